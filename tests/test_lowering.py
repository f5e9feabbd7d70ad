"""Every Pallas kernel lowers for an abstract H100, and its Triton IR compiles for three architectures."""

import functools

import jax
import jax.numpy as jnp
import lowering
import pytest

import pallas_attn
from pallas_attn.testing import cases

ARCHITECTURES = [80, 90, 100]


def paged_attention_lowered(case: cases.DecodeCase, max_pages: int, num_pages: int, config=None):
    dtype = jnp.dtype(case.dtype)
    sizes = {"NHD": (case.page_size, case.num_kv_heads), "HND": (case.num_kv_heads, case.page_size)}
    pool = jax.ShapeDtypeStruct((num_pages, *sizes[case.layout], case.head_dim), dtype)
    call = functools.partial(pallas_attn.paged_attention, layout=case.layout, config=config, return_lse=True)
    return lowering.lower_for_gpu(
        call,
        jax.ShapeDtypeStruct((case.num_seqs, case.num_heads, case.head_dim), dtype),
        pool,
        pool,
        jax.ShapeDtypeStruct((case.num_seqs, max_pages), jnp.int32),
        jax.ShapeDtypeStruct((case.num_seqs,), jnp.int32),
    )


DTYPE_CASES = [
    cases.DecodeCase((0,) * 4, 32, 8, 128, 16),
    cases.DecodeCase((0,) * 64, 32, 8, 128, 16, "float16", "HND"),
    cases.DecodeCase((0,) * 4, 9, 3, 64, 16, "float32"),
    cases.DecodeCase((0,) * 4, 126, 1, 80, 32),
    cases.DecodeCase((0,) * 64, 4, 4, 256, 64),
    cases.DecodeCase((0,) * 64, 2, 2, 512, 16),
]


@pytest.mark.parametrize("case", DTYPE_CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_paged_attention_compiles(case, sm):
    lowered = paged_attention_lowered(case, max_pages=256, num_pages=9000)
    kernels = lowering.compile_kernels(lowered, sm)
    assert [k.name for k in kernels] == ["pallas_attn_paged_attention", "pallas_attn_paged_attention_combine"]
    for kernel in kernels:
        assert kernel.shared_bytes <= lowering.SMEM_LIMIT[sm]
        # A word or two of stack is address arithmetic; a spilled tile would be kilobytes.
        assert kernel.stack_bytes <= 64, (
            f"{kernel.name} keeps {kernel.stack_bytes} bytes on the stack, sm_{sm}"
        )
    attend = kernels[0].ptx
    if case.dtype != "float32":
        assert "mma" in attend, "the tensor cores are not used"
    assert "cp.async" in attend, "loads are not pipelined"


def test_short_tables_need_no_combine():
    case = cases.DecodeCase((0,) * 64, 32, 8, 128, 16)
    lowered = paged_attention_lowered(case, max_pages=8, num_pages=1000)
    assert len(lowering.triton_kernels(lowered)) == 1


def test_no_kernel_argument_is_copied_or_gathered():
    """The module holds our kernels and no XLA op that touches a pool: no gather, no transpose, no copy."""
    case = cases.DecodeCase((0,) * 4, 32, 8, 128, 16)
    text = paged_attention_lowered(case, max_pages=256, num_pages=9000).as_text()
    touching = [line for line in text.splitlines() if "9000x16x8x128" in line]
    assert touching
    for line in touching:
        assert "custom_call" in line or "call @" in line or "func.func" in line, line


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_write_kv_compiles(layout, sm):
    new = jax.ShapeDtypeStruct((64, 3, 80), jnp.bfloat16)
    pool = jax.ShapeDtypeStruct((100, 16, 3, 80) if layout == "NHD" else (100, 3, 16, 80), jnp.bfloat16)
    lowered = lowering.lower_for_gpu(
        functools.partial(pallas_attn.write_kv, layout=layout),
        new,
        new,
        pool,
        pool,
        jax.ShapeDtypeStruct((64,), jnp.int32),
    )
    (kernel,) = lowering.compile_kernels(lowered, sm)
    assert kernel.stack_bytes == 0


def test_pools_beyond_two_to_the_31_elements_use_wide_offsets():
    """A bf16 pool above 4 GiB: element offsets no longer fit in 32 bits."""
    case = cases.DecodeCase((0,) * 4, 32, 8, 128, 16)
    num_pages = 2**31 // (16 * 8 * 128) + 1
    lowered = paged_attention_lowered(case, max_pages=256, num_pages=num_pages)
    small = paged_attention_lowered(case, max_pages=256, num_pages=1000)

    def widest(lowered) -> bool:
        from jax._src.lib import triton as triton_lib
        from jax._src.lib.mlir import ir

        _, bytecode, _, _ = lowering.triton_kernels(lowered)[0]
        with ir.Context() as context:
            triton_lib.dialect.register_dialect(context)
            return "xi64>" in str(ir.Module.parse(bytecode))

    assert widest(lowered)
    assert not widest(small)
