"""The ragged kernels lower for GPUs that are not there, and compile to machine code that fits."""

import functools

import jax
import jax.numpy as jnp
import lowering
import pytest
import triton_kernels

import pallas_attn
from pallas_attn._call.device import Device
from pallas_attn._call.pools import PoolShape, array_shape
from pallas_attn.ops.ragged_attention.config import heuristic
from pallas_attn.testing import cases

NAME = "pallas_attn_ragged_attention"


def lowered(case: cases.RaggedCase, *, num_tokens: int, sm: int = 90, new_apart: bool = False, **options):
    dtype = jnp.dtype(case.dtype)
    stored = jnp.dtype(case.cache_dtype or case.dtype)
    struct = jax.ShapeDtypeStruct
    dims = {"key": case.head_dim, "value": case.value_dim or case.head_dim}
    pools = (
        struct(
            array_shape(PoolShape(9000, case.page_size, case.num_kv_heads, dim), case.layout, which, stored),
            stored,
        )
        for which, dim in dims.items()
    )
    new = [struct((num_tokens, case.num_kv_heads, dim), dtype) for dim in dims.values()] if new_apart else []
    per_head = jnp.ones(case.num_heads) if case.alibi or case.sinks else None
    if case.scale_per_page:
        options |= dict.fromkeys(("k_scale", "v_scale"), jnp.ones((9000, case.num_kv_heads)))
    if case.tree:
        options["tree_mask"] = jnp.ones((num_tokens, case.max_tree), bool)
        options["query_positions"] = jnp.zeros(num_tokens, jnp.int32)
    call = functools.partial(
        pallas_attn.prefix_prefill if new_apart else pallas_attn.ragged_paged_attention,
        layout=case.layout,
        sliding_window=case.sliding_window,
        softcap=case.softcap,
        alibi_slopes=per_head,
        sinks=per_head,
        causal=case.causal,
        return_lse=True,
        **options,
    )
    room = case.num_seqs
    return lowering.lower_for_gpu(
        call,
        struct((num_tokens, case.num_heads, case.head_dim), dtype),
        *new,
        *pools,
        struct((room, 2048), jnp.int32),
        struct((room,), jnp.int32),
        struct((room + 1,), jnp.int32),
        struct((), jnp.int32),
        device=lowering.DEVICES[sm],
    )


def served(room, num_heads, num_kv_heads, head_dim, page_size=16, dtype="bfloat16", layout="NHD", **options):
    sizes = (num_heads, num_kv_heads, head_dim, page_size, dtype, layout)
    return cases.RaggedCase((0,) * room, *sizes, q_lens=(0,) * room, **options)


CASES = [
    (served(4, 32, 8, 128), 16384, False),
    (served(4, 9, 3, 64, dtype="float32"), 2048, False),
    (served(4, 16, 16, 192, value_dim=128), 4096, False),
    (served(4, 8, 2, 256), 2048, False),
    (served(4, 8, 2, 128, sliding_window=1024, softcap=30.0, alibi=True, sinks=True), 2048, False),
    (served(64, 32, 8, 128, layout="HND", cache_dtype="float8_e5m2"), 512, False),
    (served(4, 32, 8, 128, dtype="float16", layout="PACKED", cache_dtype="int8"), 2048, False),
    (served(4, 28, 4, 64, causal=False), 100, True),
    (served(4, 32, 8, 128, cache_dtype="float8_e4m3fn", scale_per_page=True), 2048, False),
    (served(64, 32, 8, 128, tree="positions", max_tree=16, sliding_window=1024, alibi=True), 1024, False),
]


@pytest.mark.once
@pytest.mark.parametrize(
    ("case", "num_tokens", "new_apart", "sm"),
    # The first is compiled below.
    [*((*CASES[i], 90) for i in (1, 2, 4, 6, 7)), (*CASES[5], 80), (*CASES[3], 100)],
    ids=lambda value: getattr(value, "id", str(value)),
)
def test_compiles(case, num_tokens, new_apart, sm):
    made = lowered(case, num_tokens=num_tokens, new_apart=new_apart, sm=sm)
    kernels = lowering.compile_kernels(made, sm, ending=(NAME, "_short"))
    assert [kernel.name.removeprefix(NAME) for kernel in kernels] == ["_short", ""]
    for kernel in kernels:
        assert kernel.shared_bytes <= lowering.SMEM_LIMIT[sm], kernel.name
        if case.dtype != "float32":
            assert "mma" in kernel.ptx, "the tensor cores are not used"
        if case.layout != "PACKED":
            assert "cp.async" in kernel.ptx, "loads are not pipelined"


def hot_loop(kernel: lowering.Compiled) -> str:
    """The first loop with products: over tiles that every row sees whole."""
    loops = (loop.split("scf.yield")[0] for loop in kernel.ttgir.split("scf.for")[1:])
    return next(loop for loop in loops if "dot" in loop)


@pytest.mark.parametrize("page_size", [16, pytest.param(24, marks=pytest.mark.once)])
def test_the_hot_loops_are_as_measured(page_size):
    """Hopper's asynchronous products on 128 rows; keys and values copied ahead, in both launches. Tokens' offsets in
    their pages are the same in every tile with pages of 16, and not with 24, nor in pages larger than a tile."""
    short, long = (
        kernel
        for kernel in lowering.compile_kernels(
            lowered(served(66, 32, 8, 128, page_size), num_tokens=16384), 90
        )
        if "combine" not in kernel.name
    )
    assert "wgmma" in long.ptx
    assert "mma.sync" not in long.ptx
    # A few words of addresses around the loops; a tile would be kilobytes.
    assert long.stack_bytes <= 64
    for kernel in (short, long):
        assert "ex2.approx.ftz" in kernel.ptx
        copies = hot_loop(kernel).count("async_copy_global_to_local")
        assert copies >= 2, f"{kernel.name}: loads are not pipelined"


@pytest.mark.once
@pytest.mark.sweep(sm=None)
@pytest.mark.parametrize("sm", [90, 100])
def test_latents_compile(sm):
    """576 elements of keys, 512 of which are values: one tile of them, for both products."""
    struct, bf16 = jax.ShapeDtypeStruct, jnp.bfloat16
    made = lowering.lower_for_gpu(
        lambda *a: pallas_attn.mla_prefill(*a[:6], key_up=a[6], value_up=a[7], form="absorbed"),
        struct((64, 16, 192), bf16),
        struct((900, 64, 1, 576), bf16),
        struct((4, 100), jnp.int32),
        struct((4,), jnp.int32),
        struct((5,), jnp.int32),
        struct((), jnp.int32),
        struct((16, 128, 512), bf16),
        struct((16, 128, 512), bf16),
        device=lowering.DEVICES[sm],
    )
    kernels = {kernel.name: kernel for kernel in lowering.compile_kernels(made, sm)}
    for name in (NAME, f"{NAME}_short"):
        assert kernels[name].shared_bytes <= lowering.SMEM_LIMIT[sm]
        if sm != 90:
            continue
        # Latents are copied once, not as keys and as values: 512 elements and 64. Page ids, too, in the short launch.
        copies = hot_loop(kernels[name]).count("async_copy_global_to_local")
        assert copies == (2 if name == NAME else 4), f"{name}: not pipelined"
    assert ("wgmma" if sm == 90 else "tcgen05.mma") in kernels[NAME].ptx


@pytest.mark.once
@pytest.mark.parametrize(
    ("options", "tiles"),
    [
        ({}, (128, 128, 8)),
        ({"itemsize": 1}, (128, 128, 8)),
        ({"itemsize": 1, "page_scales": True}, (128, 64, 8)),
        ({"head_dim": 64, "value_dim": 64}, (64, 128, 4)),
        ({"head_dim": 64, "value_dim": 128}, (128, 128, 8)),
    ],
    ids=str,
)
def test_tiles_are_those_measured_fastest(options, tiles):
    sizes = dict(
        num_tokens=2048, num_seqs=1, num_kv_heads=8, group=4, head_dim=128, value_dim=128, max_len=32768
    )
    widths = dict(itemsize=2, query_itemsize=2, latent=False)
    hopper = Device("gpu", *lowering.H100, compute_capability=90)
    chosen = heuristic(**{**sizes, **widths, **options}, device=hopper).long
    assert (chosen.block_q, chosen.block_kv, chosen.num_warps) == tiles


@pytest.mark.parametrize(
    ("num_tokens", "splits"), [(64, 16), (512, 2), (528, 1)], ids=["cut", "room for two", "whole"]
)
def test_no_room_for_splits_that_fill_more_than_two_rounds(num_tokens, splits):
    """16, 128 and 132 programs of 512 or more tokens each, on 132 multiprocessors."""
    chosen = heuristic(
        num_tokens=num_tokens, num_seqs=1, num_kv_heads=8, group=4, head_dim=128, value_dim=128, max_len=32768,
        itemsize=2, query_itemsize=2, latent=False, device=Device("gpu", *lowering.H100, compute_capability=90),
    )  # fmt: skip
    assert chosen.long.num_splits == splits


@pytest.mark.once
def test_few_programs_are_cut():
    """A chunk of 64 tokens behind 32k: without splits of the keys, 16 programs on 132 multiprocessors."""
    kernels = lowering.triton_kernels(lowered(served(1, 32, 8, 128), num_tokens=64))
    assert f"{NAME}_combine" in [name for name, *_ in kernels]
    whole = lowering.triton_kernels(lowered(served(1, 32, 8, 128), num_tokens=16384))
    assert f"{NAME}_combine" not in [name for name, *_ in whole]


def test_shard_map_lowers_for_a_gpu():
    P = jax.sharding.PartitionSpec
    struct = jax.ShapeDtypeStruct
    pool = struct((900, 16, 8, 128), jnp.bfloat16)
    heads = P(None, "x"), P(None, None, "x"), P(None, None, "x")

    def attend(*arguments):
        mesh = jax.sharding.get_abstract_mesh()
        op = functools.partial(pallas_attn.ragged_paged_attention, implementation="pallas")
        return jax.shard_map(op, mesh=mesh, in_specs=(*heads, P(), P(), P()), out_specs=P(None, "x"))(
            *arguments
        )

    made = lowering.lower_for_gpu(
        attend,
        struct((2048, 32, 128), jnp.bfloat16),
        *(pool, pool),
        struct((4, 64), jnp.int32),
        struct((4,), jnp.int32),
        struct((5,), jnp.int32),
        num_devices=2,
    )
    names = [name for name, *_ in lowering.triton_kernels(made)]
    assert names == [f"{NAME}_short", f"{NAME}_short_combine", NAME]


@pytest.mark.parametrize(("dtype", "element"), [("float8_e4m3fn", "f8E4M3FN"), ("float8_e5m2", "f8E5M2")])
def test_fp8_outputs_whose_offsets_would_overflow_are_refused_by_pallas(dtype, element):
    call = functools.partial(lowered, served(4, 32, 8, 128), out_dtype=dtype)
    count, limit = 600_000, 2**31 // (32 * 128)
    words = f"cannot serve this call: 8-bit outputs of .* Pallas-Triton's offsets, got {count * 32 * 128} elements"
    with pytest.raises(ValueError, match=words):
        call(num_tokens=count, implementation="pallas")
    for fits in (limit - 1, 2 * limit + 1):
        assert lowering.triton_kernels(call(num_tokens=fits, implementation="pallas"))
    with triton_kernels.written() as kernels:
        call(num_tokens=count, implementation="triton")
    lines = kernels[0].text.splitlines()
    pointers = [line for line in lines if "tt.addptr" in line and f"ptr<{element}>" in line]
    assert pointers
    assert all("i64" in line for line in pointers)
    assert not lowering.triton_kernels(call(num_tokens=count, implementation="xla"))


def test_e4m3_outputs_are_refused_where_no_instruction_makes_them():
    call = functools.partial(lowered, served(4, 8, 2, 128), num_tokens=64, sm=80, implementation="pallas")
    with pytest.raises(ValueError, match="float8_e4m3fn needs sm_89 or newer, the device is sm_80"):
        call(out_dtype="float8_e4m3fn")
    assert lowering.triton_kernels(call(out_dtype="float8_e5m2"))
