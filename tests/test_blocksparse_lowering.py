"""The block-sparse kernels lower for an abstract H100, and their Triton IR compiles for three architectures."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import lowering
import pytest

import pallas_attn
from pallas_attn import SparseLayout
from pallas_attn._call import ffi
from pallas_attn._tile.masking import Rules
from pallas_attn.ops.blocksparse_attention import cuda
from pallas_attn.ops.blocksparse_attention.operands import Operands
from pallas_attn.testing.blocksparse import BlockSparseCase


def lowered(
    case: BlockSparseCase,
    num_tokens: int,
    layout_heads: int,
    device=lowering.H100,
    gradients: bool = False,
    **options,
):
    """Four sequences, mixed, of a layout for 8192 tokens; or the gradients."""
    struct, dtype = jax.ShapeDtypeStruct, jnp.dtype(case.dtype)
    rows = 8192 // case.q_block_size
    layout = SparseLayout(
        struct((layout_heads, rows + 1), jnp.int32),
        struct((layout_heads, 9 * rows), jnp.int32),
        case.block_size,
        case.q_block_size,
    )
    lengths = {"cu_q_lens": struct((5,), jnp.int32)}
    if case.page_size is None:
        keys = struct((9000, case.num_kv_heads, case.head_dim), dtype)
        lengths["cu_k_lens"] = struct((5,), jnp.int32)
    else:
        keys = struct((900, case.page_size, case.num_kv_heads, case.head_dim), dtype)
        lengths |= {"block_tables": struct((4, 512), jnp.int32), "seq_lens": struct((4,), jnp.int32)}
    call = functools.partial(
        pallas_attn.blocksparse_attention, softcap=case.softcap, return_lse=True, **options
    )

    def results(q, k, v, layout, lengths):
        return call(q, k, v, layout, **lengths)

    def loss(*arguments):
        out, lse = results(*arguments)
        return out.astype(jnp.float32).sum() + lse.sum()

    return lowering.lower_for_gpu(
        jax.grad(loss, argnums=(0, 1, 2)) if gradients else results,
        struct((num_tokens, case.num_heads, case.head_dim), dtype),
        keys,
        keys,
        layout,
        lengths,
        device=device,
    )


CASES = [
    BlockSparseCase((), 32, 8, 128, "any", 128, 128),
    BlockSparseCase((), 32, 8, 128, "any", 64, 64, page_size=16),
    BlockSparseCase((), 9, 3, 80, "any", 64, 32, dtype="float16", softcap=30.0),
    BlockSparseCase((), 4, 4, 256, "any", 64, 64, page_size=64),
    BlockSparseCase((), 4, 1, 64, "any", 64, 64, dtype="float32"),
]


@pytest.mark.parametrize(
    ("case", "sm"),
    # By "triton" the same bodies are compiled for sm_80 to sm_120 (test_triton_lowering.py).
    [*((case, 90) for case in CASES), (CASES[0], 100)],
    ids=lambda value: getattr(value, "id", str(value)),
)
@pytest.mark.once
def test_kernels_compile(case, sm):
    kernels = lowering.compile_kernels(lowered(case, 4096, case.num_heads, lowering.DEVICES[sm]), sm)
    assert [k.name.removeprefix("pallas_attn_blocksparse_") for k in kernels][:2] == ["prefill", "decode"]
    for kernel in kernels:
        assert kernel.shared_bytes <= lowering.SMEM_LIMIT[sm]
        # Up to 24 words of addresses for sm_100; a spilled tile would be kilobytes.
        assert kernel.stack_bytes <= 96, f"{kernel.name} keeps {kernel.stack_bytes} bytes on the stack"
    prefill, decode, *_ = kernels
    if case.dtype != "float32":
        asynchronous = sm == 90 and case.q_block_size >= 64
        assert ("wgmma" if asynchronous else "mma") in prefill.ptx
        assert "mma" in decode.ptx
        for kernel in (prefill, decode):
            assert "cp.async" in kernel.ptx, f"{kernel.name}: loads are not pipelined"


GRADIENT_CASES = [
    CASES[0],
    BlockSparseCase((), 32, 8, 128, "any", 64, 64),
    CASES[2],
    BlockSparseCase((), 4, 4, 256, "any", 64, 64),
    CASES[4],
]


@pytest.mark.parametrize(
    ("case", "sm"),
    [*((case, 90) for case in GRADIENT_CASES), (GRADIENT_CASES[1], 80)],
    ids=lambda value: getattr(value, "id", str(value)),
)
@pytest.mark.once
def test_gradients_compile(case, sm):
    made = lowered(case, 4096, case.num_heads, lowering.DEVICES[sm], gradients=True)
    # Triton 3.6 has no room for heads of 256: 504 bytes of dkv's are spilled.
    triton = lowering.NEWEST_TRITON if case.head_dim == 256 else lowering.USUAL_TRITON
    kernels = lowering.compile_kernels(made, sm, triton, ending=("_dq", "_dkv"))
    names = [kernel.name.removeprefix("pallas_attn_blocksparse_") for kernel in kernels]
    assert sorted(names) == ["dkv", "dq"]
    for name, kernel in zip(names, kernels, strict=True):
        assert kernel.shared_bytes <= lowering.SMEM_LIMIT[sm]
        # Sums of two arrays at once; a spilled tile would be kilobytes. dq's sums that correct rounding take more where
        # nothing is tuned (sm_80), where logits are capped, and with heads of 256.
        corrects = case.dtype != "float32" and (sm == 80 or case.softcap or case.head_dim == 256)
        most = 600 if name == "dq" and corrects else 256
        assert kernel.stack_bytes <= most, f"{name} keeps {kernel.stack_bytes} bytes on the stack"
        assert ("mma" in kernel.ptx) == (case.dtype != "float32"), f"{name}: the tensor cores are not used"
        if case is GRADIENT_CASES[0] and sm == 90:
            assert kernel.ptx.count("wgmma.mma_async") >= 24, name
            assert kernel.ptx.count("cp.async.cg") >= 12, name


@pytest.mark.parametrize("triton", lowering.TRITON_ENDS)
def test_keys_are_copied_two_steps_ahead(triton):
    """A column that is loaded asynchronously itself would cost the keys a step (see `walk.spoiled`)."""
    config = pallas_attn.BlockSparseConfig(128, 128, 8, 3)
    prefill, *_ = lowering.compile_kernels(lowered(CASES[0], 4096, 32, config=config), 90, triton)
    assert "memdesc<3x" in prefill.ttgir
    assert "memdesc<2x" not in prefill.ttgir
    assert "memdesc<1x1xi32" not in prefill.ttgir


def test_one_launch_where_all_is_pure():
    struct = jax.ShapeDtypeStruct
    layout = SparseLayout(struct((1, 129), jnp.int32), struct((1, 900), jnp.int32), 64, 64)
    keys, ends = struct((8192, 8, 128), jnp.bfloat16), struct((3,), jnp.int32)

    def names(tokens: int) -> list[str]:
        def call(q, k, v, layout, ends):
            return pallas_attn.blocksparse_attention(q, k, v, layout, cu_k_lens=ends)

        query = struct((tokens, 32, 128), jnp.bfloat16)
        found = lowering.triton_kernels(lowering.lower_for_gpu(call, query, keys, keys, layout, ends))
        return [name.removeprefix("pallas_attn_blocksparse_") for name, *_ in found]

    assert names(8192) == ["prefill"]
    assert names(2) in (["decode"], ["decode", "combine"])


# Of results in bf16; lse is put together from its parts.
COPIES = r"stablehlo\.(?:scatter|dynamic_update_slice|gather|select .*bf16)"


@pytest.mark.parametrize("implementation", ["pallas", "triton"])
def test_mixed_calls_are_kernels_of_ours_alone(implementation):
    """Decoded tokens are written where prefill left room, not copied there behind it by XLA."""
    text = lowered(CASES[0], 4096, 32, implementation=implementation).as_text()
    assert len(re.findall(r"custom_call @\S*xla\.gpu\.(?:triton|ptx)", text)) == 3
    assert not re.findall(COPIES, text)


@pytest.fixture
def with_library(monkeypatch):
    """As where there is a driver for the CUDA library: calls of it are lowered, and nothing can run them."""
    monkeypatch.setattr(ffi, "register", lambda: None)
    monkeypatch.setattr(ffi, "is_available", lambda: (True, None))


PREFILL = "custom_call @pallas_attn_blocksparse_prefill_sm90"


@pytest.mark.usefixtures("with_library")
def test_cuda_is_chosen_and_has_the_others_kernels_beside_it():
    text = lowered(CASES[0], 4096, 32).as_text()
    assert text.count(PREFILL) == 1
    assert "skip_single = true" in text
    assert len(re.findall(r"custom_call @\S*xla\.gpu\.(?:triton|ptx)", text)) == 2
    assert not re.findall(COPIES, text)
    made = lowered(CASES[0], 4096, 32, gradients=True)
    assert made.as_text().count(PREFILL) == 1
    names = [name.removeprefix("pallas_attn_blocksparse_") for name, *_ in lowering.triton_kernels(made)]
    assert {"dq", "dkv"} <= set(names)
    assert "prefill" not in names


@pytest.mark.usefixtures("with_library")
@pytest.mark.parametrize("changes", [{"page_size": 16}, {"softcap": 5.0}, {"dtype": "float32"}, {"head_dim": 64},
                                     {"block_size": 64}, {"q_block_size": 64}], ids=str)  # fmt: skip
def test_what_cuda_cannot_serve_others_do(changes):
    case = dataclasses.replace(CASES[0], **changes)
    reason = {"page_size": "keys in rows, got pages", "softcap": "has no softcap", "dtype": "float16, got float32",
                 "head_dim": "head_dim 128, got 64", "block_size": "at least 128 tokens, got 64 by 128",
                 "q_block_size": "at least 128 tokens, got 128 by 64"}[next(iter(changes))]  # fmt: skip
    assert PREFILL not in lowered(case, 4096, 32).as_text()
    with pytest.raises(ValueError, match=f"implementation 'cuda' cannot serve this call: .*{reason}"):
        lowered(case, 4096, 32, implementation="cuda")


@pytest.mark.usefixtures("with_library")
def test_cuda_takes_neither_tiles_nor_decoding_and_leaves_short_prompts():
    config = pallas_attn.BlockSparseConfig()
    with pytest.raises(ValueError, match="'cuda' cannot serve this call: takes a BlockSparseCudaConfig"):
        lowered(CASES[0], 4096, 32, implementation="cuda", config=config)
    assert PREFILL not in lowered(CASES[0], 4096, 32, config=config).as_text()
    struct = jax.ShapeDtypeStruct
    pointers, keys = struct((1, 65), jnp.int32), struct((9000, 8, 128), jnp.bfloat16)
    operands = Operands(
        query=struct((4, 32, 128), jnp.bfloat16), key=keys, value=keys,
        layout=SparseLayout(pointers, pointers, 128, 128),
        cu_k_lens=struct((5,), jnp.int32), cache_layout=None, kinds="decode", scale=1.0, rules=Rules(),
    )  # fmt: skip
    assert "one query each" in (cuda.unsupported(operands) or "")
    # Four sequences in either call.
    assert PREFILL in lowered(CASES[0], 4 * 128, 32).as_text()
    assert PREFILL not in lowered(CASES[0], 4 * 128 - 1, 32).as_text()
    assert PREFILL in lowered(CASES[0], 4 * 128 - 1, 32, implementation="cuda").as_text()
    tokens = struct((2**31 - 1, 128, 128), jnp.bfloat16)
    many = dataclasses.replace(operands, kinds="prefill", query=tokens)
    assert "at most" in (cuda.unsupported(many) or "")
