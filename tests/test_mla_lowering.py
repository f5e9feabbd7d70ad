"""The MLA kernels lower for an abstract H100, and their Triton IR compiles for three architectures."""

import functools
import re

import jax
import jax.numpy as jnp
import lowering
import pytest

import pallas_attn
from pallas_attn._call import ffi
from pallas_attn._call.device import Device
from pallas_attn._split import latent_problem
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
    num_pages=9000,
    cache_dtype=None,
    **options,
):
    options["implementation"] = implementation

    def call(query, cache, tables, lens):
        schedule = pallas_attn.mla_schedule(lens, num_heads=num_heads, q_len=q_len) if scheduled else None
        return pallas_attn.mla_decode(query, cache, tables, lens, schedule=schedule, causal=True, **options)

    shape = jax.ShapeDtypeStruct
    return lowering.lower_for_gpu(
        functools.partial(call),
        shape((num_seqs, q_len, num_heads, 576), dtype),
        shape((num_pages, page_size, 1, 656 if cache_dtype == jnp.uint8 else 576), cache_dtype or dtype),
        shape((num_seqs, max_pages), jnp.int32),
        shape((num_seqs,), jnp.int32),
        device=lowering.DEVICES[sm],
    )


@pytest.mark.parametrize(
    ("shape", "sm", "triton"),
    [
        *((shape, 90, lowering.USUAL_TRITON) for shape in SHAPES),
        *((SHAPES[i], 80, lowering.USUAL_TRITON) for i in (0, 4)),
        (SHAPES[3], 100, lowering.USUAL_TRITON),
        *((SHAPES[4], 90, triton) for triton in lowering.TRITON_ENDS[1:]),
    ],
    ids=str,
)
def test_mla_decode_compiles(shape, sm, triton):
    kernels = lowering.compile_kernels(lowered_call(*shape, sm=sm), sm, triton)
    assert [k.name for k in kernels] == ["pallas_attn_mla_decode", "pallas_attn_mla_decode_combine"]
    for kernel in kernels:
        assert kernel.shared_bytes <= lowering.SMEM_LIMIT[sm], kernel.name
        most = 512 if triton == lowering.NEWEST_TRITON else 576
        assert kernel.stack_bytes <= most, f"{kernel.name} keeps {kernel.stack_bytes} bytes on the stack"
    attend = kernels[0].ptx
    assert "cp.async" in attend, "loads are not pipelined"
    assert "mma" in attend, "the tensor cores are not used"


@pytest.mark.once
def test_64_rows_use_asynchronous_products_without_repeating_them():
    """With pages too short to turn: 36 steps of 16 over 576, once where a mask is needed and once where not; 2 for a
    tile's 32 tokens."""
    lowered = lowered_call(64, 1, 32, jnp.bfloat16, True)
    [attend, _] = lowering.compile_kernels(lowered, 90)
    assert attend.ptx.count("wgmma.mma_async") == 2 * 36 + 2


@pytest.mark.parametrize(("rows", "num_pages"), [(32, 9000), (32, 2**31 // (64 * 576) + 1), (64, 9000)])
def test_rows_are_the_narrow_side_of_asynchronous_products(rows, num_pages):
    """36 steps of 16 over 576, and for each of 8 x 64 dims 4 over a tile's tokens; none of it warp by warp. Two
    warpgroups have half of the rows and half of the dims each. Queries lie in shared memory beside two tiles and the
    weights, and are written there before the loop over tiles."""
    lowered = lowered_call(rows, 1, 64, jnp.bfloat16, True, num_pages=num_pages)
    [attend, _] = lowering.compile_kernels(lowered, 90)
    assert attend.ptx.count("wgmma.mma_async") == 36 + 8 * 4 * 32 // rows
    assert attend.ptx.count("wgmma.mma_async.sync.aligned.m64n32k16") >= 36, (
        "whose logits are computed twice?"
    )
    assert "mma.sync" not in attend.ptx
    needed = latent_problem.needs(rows, 64, rows // 8, 2, fp8=False, transposed=True)
    assert attend.shared_bytes == needed.shared_bytes(Device("gpu", *lowering.H100, 90))


@pytest.mark.once
@pytest.mark.parametrize("triton", lowering.TRITON_ENDS)
def test_two_warpgroups_seldom_meet(triton):
    """Once before the next tile's copies and twice for the vote; not three times as often, as where columns that both
    have are reduced before the rest."""
    lowered = lowered_call(64, 1, 64, jnp.bfloat16, True)
    attend, *_ = lowering.compile_kernels(lowered, 90, triton, ("decode",))
    behind_logits = attend.ptx[attend.ptx.rindex("m64n32k16") :]
    copies, mask, vote, *_ = re.split(r"\bbra\b", behind_logits)
    assert 1 <= vote.count("bar.sync") <= 2
    assert copies.count("bar.sync") + mask.count("bar.sync") <= 1


def test_nothing_else_touches_the_cache():
    """The module holds our kernels and no XLA op that touches the pool: no gather, no transpose, no copy."""
    lowered = lowered_call(*SHAPES[0])
    touching = [line for line in lowered.as_text().splitlines() if "9000x64x1x576" in line]
    assert touching
    for line in touching:
        assert "custom_call" in line or "call @" in line or "func.func" in line, line


@pytest.mark.once  # our arithmetic; the shapes it gives are lowered on both above
@pytest.mark.parametrize(("num_heads", "page_size", "sm"), [(16, 64, 86), (128, 64, 120), (16, 16, 120)])
def test_heuristic_fits_small_shared_memories(num_heads, page_size, sm):
    """99 KiB, on GPUs whose names jax does not tell apart: the config is made for each and given. To Triton sm_89 is
    sm_86 but for products of 8-bit numbers, which this kernel has none of."""

    def config_of(sm: int) -> MLADecodeConfig:
        sizes = dict(rows=num_heads, page_size=page_size)
        return heuristic(**sizes, device=Device("gpu", "", 100, sm))

    config = config_of(sm)
    assert config_of(89) == config
    lowered = lowered_call(num_heads, 1, page_size, jnp.bfloat16, False, config=config)
    for kernel in lowering.compile_kernels(lowered, sm):
        assert kernel.shared_bytes <= 99 * 1024, (config, kernel.shared_bytes)


@pytest.mark.once
@pytest.mark.parametrize(
    ("sizes", "page_size", "cache_dtype", "needed"),
    [
        ((16, 128, 8, 2), 128, jnp.uint8, 249856),  # what XLA asked for on an H200
        ((64, 64, 8, 4), 64, jnp.uint8, 273408),
        ((64, 32, 8, 5), 64, jnp.bfloat16, 258048),
        ((16, 128, 8, 5), 128, jnp.bfloat16, 313344),
        ((32, 64, 4, 3), 64, jnp.bfloat16, 262144),  # products transposed
        ((64, 64, 8, 3), 64, jnp.bfloat16, 303104),
        ((16, 128, 8, 4), 128, jnp.bfloat16, None),  # a look-up per token: one buffer
        ((64, 64, 8, 3), 64, jnp.uint8, None),
    ],
)
def test_tiles_that_no_program_has_shared_memory_for_are_refused(sizes, page_size, cache_dtype, needed):
    """Those that are let pass compile to what a program may have; without the check, XLA says it when it compiles."""
    block_q, block_kv, num_warps, num_stages = sizes
    config = MLADecodeConfig(block_q, block_kv, num_warps=num_warps, num_stages=num_stages)
    call = functools.partial(
        lowered_call, 16, 1, page_size, jnp.bfloat16, False, cache_dtype=cache_dtype, config=config
    )
    if needed is None:
        assert lowering.compile_kernels(call(), 90)[0].shared_bytes <= lowering.SMEM_LIMIT[90]
    else:
        words = f"'config': expected tiles that fit in 232448 bytes of shared memory, got {needed} bytes for"
        with pytest.raises(ValueError, match=words):
            call()


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


@pytest.mark.once
@pytest.mark.parametrize("scheduled", [True, False])
def test_short_sequences_that_fill_the_device_are_left_whole(scheduled):
    """One kernel then: nothing to deal and nothing to merge, whatever a schedule would have cut."""

    def names(num_seqs: int, max_pages: int) -> list[str]:
        lowered = lowered_call(16, 1, 64, jnp.bfloat16, scheduled, num_seqs, max_pages=max_pages)
        return [name for name, *_ in lowering.triton_kernels(lowered)]

    whole, cut = ["pallas_attn_mla_decode"], ["pallas_attn_mla_decode", "pallas_attn_mla_decode_combine"]
    assert names(128, 16) == whole
    assert names(133, 16) == cut, "a second wave, of one"
    assert names(64, 16) == cut, "half the multiprocessors idle"
    assert names(128, 32) == cut, "one long sequence might keep the others waiting"
