"""The MLA kernels lower for an abstract H100, and their Triton IR compiles for three architectures."""

import functools

import jax
import jax.numpy as jnp
import lowering
import pytest

import pallas_attn
from pallas_attn._call import ffi
from pallas_attn._call.device import Device
from pallas_attn.ops.mla_decode.config import MLADecodeConfig, heuristic

# (num_heads, q_len, page_size, dtype, scheduled)
SHAPES = [
    (16, 1, 64, jnp.bfloat16, True),
    (16, 1, 64, jnp.bfloat16, False),
    (16, 2, 64, jnp.float16, True),
    (128, 1, 64, jnp.bfloat16, True),
    (63, 2, 16, jnp.bfloat16, False),
    (9, 1, 128, jnp.bfloat16, True),
    (16, 1, 16, jnp.bfloat16, True),
    (32, 1, 32, jnp.bfloat16, False),
]

GPUS = {80: ("NVIDIA A100-SXM4-80GB", 108), 90: lowering.H100, 100: ("NVIDIA B200", 148)}


def lowered_call(
    num_heads,
    q_len,
    page_size,
    dtype,
    scheduled,
    num_seqs=4,
    sm=90,
    implementation="pallas",
    max_pages=256,
    **options,
):
    options["implementation"] = implementation

    def call(query, cache, tables, lens):
        schedule = pallas_attn.mla_schedule(lens, num_heads=num_heads, q_len=q_len) if scheduled else None
        return pallas_attn.mla_decode(query, cache, tables, lens, schedule=schedule, causal=True, **options)

    device = Device("gpu", *GPUS[sm], sm)
    config = heuristic(
        num_seqs=num_seqs,
        num_kv_heads=1,
        rows=q_len * num_heads,
        page_size=page_size,
        max_len=max_pages * page_size,
        device=device,
    )
    shape = jax.ShapeDtypeStruct
    return lowering.lower_for_gpu(
        functools.partial(call),
        shape((num_seqs, q_len, num_heads, 576), dtype),
        shape((9000, page_size, 1, 576), dtype),
        shape((num_seqs, max_pages), jnp.int32),
        shape((num_seqs,), jnp.int32),
        device=GPUS[sm],
    ), config


@pytest.mark.parametrize(
    ("shape", "sm"), [*((s, 90) for s in SHAPES), (SHAPES[0], 80), (SHAPES[4], 80), (SHAPES[3], 100)], ids=str
)
def test_mla_decode_compiles(shape, sm):
    _, config = lowered_call(*shape, sm=sm)
    lowered, _ = lowered_call(*shape, sm=sm, config=config)
    kernels = lowering.compile_kernels(lowered, sm)
    assert [k.name for k in kernels] == ["pallas_attn_mla_decode", "pallas_attn_mla_decode_combine"]
    for kernel in kernels:
        assert kernel.shared_bytes <= lowering.SMEM_LIMIT[sm], (config, kernel.shared_bytes)
        assert kernel.stack_bytes <= 512, f"{kernel.name} keeps {kernel.stack_bytes} bytes on the stack"
    attend = kernels[0].ptx
    assert "cp.async" in attend, "loads are not pipelined"
    assert "mma" in attend, "the tensor cores are not used"


def test_64_rows_use_asynchronous_products_without_repeating_them():
    """36 steps of 16 over 576, once where a mask is needed and once where not; 2 for a tile's 32 tokens."""
    lowered, _ = lowered_call(64, 1, 64, jnp.bfloat16, True)
    [attend, _] = lowering.compile_kernels(lowered, 90)
    assert attend.ptx.count("wgmma.mma_async") == 2 * 36 + 2


def test_nothing_else_touches_the_cache():
    """The module holds our kernels and no XLA op that touches the pool: no gather, no transpose, no copy."""
    lowered, _ = lowered_call(*SHAPES[0])
    touching = [line for line in lowered.as_text().splitlines() if "9000x64x1x576" in line]
    assert touching
    for line in touching:
        assert "custom_call" in line or "call @" in line or "func.func" in line, line


def test_heuristic_fits_small_shared_memories():
    for capability, limit in ((80, 163), (86, 99), (89, 99), (90, 227), (100, 227), (120, 99)):
        for rows in (1, 16, 32, 64, 256):
            device = Device("gpu", "", 100, capability)
            config = heuristic(
                num_seqs=1,
                num_kv_heads=1,
                rows=rows,
                page_size=64,
                max_len=4096,
                device=device,
            )
            assert (config.block_q + (config.num_stages - 1) * config.block_kv) * 1152 <= limit * 1024, config


def test_float32_is_refused_with_a_reason():
    with pytest.raises(ValueError, match="implementation 'pallas' cannot serve this call"):
        lowered_call(16, 1, 64, jnp.float32, False, implementation="pallas")


@pytest.mark.parametrize("scheduled", [True, False])
def test_vmap_lowers(scheduled):
    """A fourth dimension of the grid, of which Triton has three."""

    def calls(queries, cache, tables, lens):
        schedule = pallas_attn.mla_schedule(lens, num_heads=16) if scheduled else None

        def call(query):
            return pallas_attn.mla_decode(
                query, cache, tables, lens, schedule=schedule, implementation="pallas"
            )

        return jax.vmap(call)(queries)

    shape = jax.ShapeDtypeStruct
    lowered = lowering.lower_for_gpu(
        calls,
        shape((3, 4, 1, 16, 576), jnp.bfloat16),
        shape((90, 64, 1, 576), jnp.bfloat16),
        shape((4, 20), jnp.int32),
        shape((4,), jnp.int32),
    )
    assert len(lowering.compile_kernels(lowered, 90)) == 2


@pytest.mark.parametrize(
    ("num_heads", "num_seqs", "page_size", "dtype", "options", "chosen"),
    [
        (128, 4, 64, jnp.bfloat16, {}, "cuda"),
        (32, 128, 64, jnp.float16, {}, "cuda"),
        (16, 4, 64, jnp.bfloat16, {"max_pages": 257}, "cuda"),
        (16, 4, 64, jnp.bfloat16, {}, "pallas"),  # few rows over few tokens: Pallas is faster
        (16, 2, 64, jnp.bfloat16, {}, "pallas"),
        (32, 4, 64, jnp.bfloat16, {"max_pages": 16}, "cuda"),
        (16, 5, 64, jnp.bfloat16, {"max_pages": 16}, "cuda"),
        (16, 1, 64, jnp.bfloat16, {"max_pages": 16}, "cuda"),
        (128, 4, 16, jnp.bfloat16, {}, "pallas"),  # what the CUDA kernel cannot serve
        (128, 4, 64, jnp.bfloat16, {"config": MLADecodeConfig(64, 32)}, "pallas"),
    ],
)
def test_the_faster_kernel_is_chosen_on_hopper(num_heads, num_seqs, page_size, dtype, options, chosen):
    available, reason = ffi.is_available()
    if not available:
        pytest.skip(str(reason))
    with pallas_attn.record_implementations() as served:
        lowered_call(num_heads, 1, page_size, dtype, True, num_seqs, implementation=None, **options)
    assert served == {"mla_decode": chosen}
