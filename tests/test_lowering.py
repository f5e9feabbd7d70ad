"""Every Pallas kernel lowers for an abstract H100, and its Triton IR compiles for three architectures."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import lowering
import pytest
import triton_shapes

import pallas_attn
from pallas_attn import LocalStride
from pallas_attn._call import configs
from pallas_attn._call.pools import PoolShape, array_shape
from pallas_attn.ops.paged_attention import PagedAttentionConfig
from pallas_attn.testing import cases


def paged_attention_lowered(
    case: cases.DecodeCase,
    max_pages: int,
    num_pages: int,
    config=None,
    device=lowering.H100,
    batch_invariant: bool = False,
):
    dtype = jnp.dtype(case.dtype)
    shape = PoolShape(num_pages, case.page_size, case.num_kv_heads, case.head_dim)
    stored = jnp.dtype(case.cache_dtype or case.dtype)
    pools = (
        jax.ShapeDtypeStruct(array_shape(shape, case.layout, w, stored), stored) for w in ("key", "value")
    )
    per_head = jnp.ones(case.num_heads) if case.alibi or case.sinks else None
    drafts = (case.num_seqs, case.q_len)
    tree = jnp.ones((*drafts, case.q_len), bool) if case.tree else None
    positions = jnp.zeros(drafts, jnp.int32) if case.tree == "positions" else None
    call = functools.partial(
        pallas_attn.paged_attention,
        layout=case.layout,
        sliding_window=case.sliding_window,
        softcap=case.softcap,
        block_sparse=case.block_sparse,
        alibi_slopes=per_head,
        sinks=per_head,
        tree_mask=tree,
        query_positions=positions,
        config=config,
        batch_invariant=batch_invariant,
        return_lse=True,
    )
    return lowering.lower_for_gpu(
        call,
        jax.ShapeDtypeStruct((case.num_seqs, case.q_len, case.num_heads, case.head_dim), dtype),
        *pools,
        jax.ShapeDtypeStruct((case.num_seqs, max_pages), jnp.int32),
        jax.ShapeDtypeStruct((case.num_seqs,), jnp.int32),
        device=device,
    )


DTYPE_CASES = [
    cases.DecodeCase((0,) * 4, 32, 8, 128, 16),
    cases.DecodeCase((0,) * 64, 32, 8, 128, 16, "float16", "HND"),
    cases.DecodeCase((0,) * 4, 9, 3, 64, 16, "float32"),
    cases.DecodeCase((0,) * 4, 126, 1, 80, 32),
    cases.DecodeCase((0,) * 64, 4, 4, 256, 64),
    cases.DecodeCase((0,) * 64, 2, 2, 512, 16),
    cases.DecodeCase((0,) * 4, 6, 2, 8, 4),
    cases.DecodeCase((0,) * 64, 32, 8, 128, 16, cache_dtype="float8_e5m2"),
    cases.DecodeCase((0,) * 4, 32, 8, 128, 16, "float16", "PACKED", cache_dtype="int8", scale_per_head=True),
    cases.DecodeCase(
        (0,) * 4, 32, 8, 128, 16, sliding_window=1024, softcap=30.0, alibi=True, sinks=True, q_len=2
    ),
    cases.DecodeCase((0,) * 4, 32, 8, 128, 16, block_sparse=LocalStride(64, 8, 8, 1)),
    cases.DecodeCase((0,) * 4, 32, 8, 128, 16, q_len=7, tree="positions", alibi=True, sliding_window=300),
]
# What differs elsewhere: less shared memory on sm_80, of which float32 wants the most; a compiler of its own for
# products on sm_100. Layouts and masks are the same text on all.
ELSEWHERE = [(DTYPE_CASES[i], 80) for i in (0, 2, 8, 11)] + [(DTYPE_CASES[i], 100) for i in (0, 7)]
# Hints of loads are spelled anew in 3.9; narrow types are converted in each version's own way.
NEWER_TRITON_CASES = [DTYPE_CASES[i] for i in (0, 7)]
E4M3 = cases.DecodeCase((0,) * 4, 32, 8, 128, 16, cache_dtype="float8_e4m3fn")


@pytest.mark.parametrize(
    ("case", "sm", "triton"),
    [
        *((case, 90, lowering.USUAL_TRITON) for case in DTYPE_CASES),
        *((case, sm, lowering.USUAL_TRITON) for case, sm in ELSEWHERE),
        *((case, 90, triton) for case in NEWER_TRITON_CASES for triton in lowering.TRITON_ENDS[1:]),
    ],
    ids=lambda value: getattr(value, "id", str(value)),
)
def test_paged_attention_compiles(case, sm, triton):
    lowered = paged_attention_lowered(case, max_pages=256, num_pages=9000, device=lowering.DEVICES[sm])
    kernels = lowering.compile_kernels(lowered, sm, triton)
    # What a short window or a short table leaves is not cut, and not merged.
    short = 256 * case.page_size <= 1024 or (case.sliding_window is not None and case.sliding_window < 512)
    names = ["pallas_attn_paged_attention", "pallas_attn_paged_attention_combine"]
    assert [k.name for k in kernels] == (names[:1] if short else names)
    for kernel in kernels:
        assert kernel.shared_bytes <= lowering.SMEM_LIMIT[sm]
        # A word or two of stack is address arithmetic; a spilled tile would be kilobytes.
        assert kernel.stack_bytes <= 64, (
            f"{kernel.name} keeps {kernel.stack_bytes} bytes on the stack, sm_{sm}"
        )
    attend = kernels[0].ptx
    if case.dtype != "float32":
        assert "mma" in attend, "the tensor cores are not used"
    # PACKED scatters a token's elements: its loads are too narrow to be copied asynchronously.
    if case.layout != "PACKED":
        assert "cp.async" in attend, "loads are not pipelined"


@pytest.mark.once  # the heuristic's arithmetic: what is lowered for it is so above, on both
@pytest.mark.parametrize(
    ("head_dim", "group", "q_len", "dtype", "cache_dtype"),
    [
        (512, 16, 4, "bfloat16", None),
        (512, 64, 1, "float32", None),
        (256, 64, 1, "bfloat16", "float8_e5m2"),
    ],
)
def test_wide_heads_with_many_rows_fit(head_dim, group, q_len, dtype, cache_dtype):
    """Where shared memory is less; the heuristic takes what there is."""
    sm = 80
    case = cases.DecodeCase((0,) * 4, 2 * group, 2, head_dim, 16, dtype, q_len=q_len, cache_dtype=cache_dtype)
    lowered = paged_attention_lowered(case, max_pages=256, num_pages=900, device=lowering.DEVICES[sm])
    attend, *_ = lowering.compile_kernels(lowered, sm)
    assert attend.shared_bytes <= lowering.SMEM_LIMIT[sm]


@pytest.mark.parametrize("sm", [90, 100])
def test_e4m3_compiles_where_the_hardware_converts(sm):
    lowered = paged_attention_lowered(E4M3, max_pages=256, num_pages=9000, device=lowering.DEVICES[sm])
    (kernel, _) = lowering.compile_kernels(lowered, sm)
    assert "e4m3x2" in kernel.ptx
    assert kernel.stack_bytes == 0


@pytest.mark.parametrize("cache_dtype", ["float8_e4m3fn", "int8"])
def test_no_tile_of_bytes_is_read_by_bytes(cache_dtype):
    """Neither from shared memory nor into it: values that Triton transposes itself are, and 8 bytes at a time."""
    case = cases.DecodeCase((0,) * 64, 32, 8, 128, 16, cache_dtype=cache_dtype)
    lowered = paged_attention_lowered(case, max_pages=512, num_pages=9000)
    (kernel, _) = lowering.compile_kernels(lowered, 90)
    loads = re.findall(r"ld\.shared\S*\.[bsu]8\b", kernel.ptx)
    assert len(loads) < 16, "more than the masks of tokens"
    copied = {int(size, 16) for size in re.findall(r"cp\.async\.c[ag]\S* .*?(0x\w+)", kernel.ptx)}
    assert 16 in copied
    assert 8 not in copied


@pytest.mark.parametrize("triton", lowering.TRITON_ENDS)
def test_transposed_products_wait_for_no_page_id(triton):
    """A program of eight rows has a tile of keys and one of values under way while it works, and copies nothing else:
    to wait for ids that were copied last would be to wait for everything."""
    case = cases.DecodeCase((0,) * 64, 32, 8, 128, 16, cache_dtype="float8_e5m2")
    lowered = paged_attention_lowered(case, max_pages=512, num_pages=9000)
    (kernel, _) = lowering.compile_kernels(lowered, 90, triton)
    assert "m16n8k16" in kernel.ptx
    assert {int(left) for left in re.findall(r"cp\.async\.wait_group\s+(\d+)", kernel.ptx)} == {0, 2}
    copied = {int(size, 16) for size in re.findall(r"cp\.async\.c[ag]\S* .*?(0x\w+)", kernel.ptx)}
    assert copied == {16}


def test_e4m3_is_refused_where_it_does_not():
    with pytest.warns(UserWarning, match="float8_e4m3fn needs sm_89 or newer, the device is sm_80"):
        paged_attention_lowered(E4M3, max_pages=256, num_pages=9000, device=lowering.DEVICES[80])


def test_8_bit_pools_whose_offsets_would_overflow_are_refused_by_pallas():
    pages = 2**31 // (16 * 8 * 128)
    new, slots = jax.ShapeDtypeStruct((4, 8, 128), jnp.bfloat16), jax.ShapeDtypeStruct((4,), jnp.int32)

    def write(pages: int, implementation: str | None):
        call = functools.partial(pallas_attn.write_kv, implementation=implementation)
        pool = jax.ShapeDtypeStruct((pages, 16, 8, 128), jnp.int8)
        return lowering.triton_kernels(lowering.lower_for_gpu(call, new, new, pool, pool, slots))

    with pytest.raises(ValueError, match="overflow Pallas-Triton's offsets, got 2147483648 elements"):
        write(pages, "pallas")
    assert not write(pages, None), "Triton itself or plain jnp, which both count in 64 bits"
    assert len(write(2 * pages + 1, "pallas")) == 1, "offsets of 64 bits again"
    assert not lowering.triton_kernels(
        paged_attention_lowered(E4M3, max_pages=256, num_pages=2**31 // (16 * 8 * 128))
    )


def masked(op: str, **options):
    """Of a call whose mask has 2**31 elements."""
    struct = jax.ShapeDtypeStruct
    heads, most = (2, 16), 2**15
    if op == "flash_attention":
        floats = {"query": (1, 2 * most, *heads), "key": (1, most, *heads), "value": (1, most, *heads)}
        ints, mask = {}, {"mask": (1, 1, 2 * most, most)}
    else:
        flat = op == "ragged_paged_attention"
        floats = {"query": (2 * most, *heads) if flat else (2, most, *heads)}
        floats |= dict.fromkeys(("key_cache", "value_cache"), (9, 16, *heads))
        ints = {"block_tables": (2, 4), "seq_lens": (2,)} | ({"cu_q_lens": (3,)} if flat else {})
        mask = {"tree_mask": (2 * most, most) if flat else (2, most, most)}
    arrays = {
        name: struct(shape, dtype)
        for shapes, dtype in ((floats, jnp.bfloat16), (ints, jnp.int32), (mask, jnp.bool_))
        for name, shape in shapes.items()
    }
    call = functools.partial(getattr(pallas_attn, op), **options)
    return lowering.lower_for_gpu(lambda arrays: call(**arrays), arrays)


@pytest.mark.parametrize("op", ["paged_attention", "ragged_paged_attention", "flash_attention"])
def test_masks_whose_offsets_would_overflow_are_refused_by_pallas(op):
    words = "'pallas' cannot serve this call: 8-bit .*masks of .* offsets, got 2147483648 elements"
    with pytest.raises(ValueError, match=words):
        masked(op, implementation="pallas")
    assert not lowering.triton_kernels(masked(op)), "Triton itself or plain jnp"


TILE = ("block_q", "block_kv", "num_warps", "num_stages")


@pytest.mark.once  # of a kernel that is lowered on both above
def test_measured_configs_compile():
    """What the file for the H100 says fits the H100, for the most splits that its ranges allow."""
    path = configs.packaged_configs() / "nvidia-h100-80gb-hbm3" / "paged_attention.json"
    entries = json.loads(path.read_text())["entries"]
    assert entries
    # An entry may leave the query rows to the heuristic, which gives up to 16 of them a tile of 16.
    tiles = {
        (entry["key"]["head_dim"], *(({"block_q": 16} | entry["config"])[name] for name in TILE))
        for entry in entries
    }
    for head_dim, *sizes in sorted(tiles):
        config = dict(zip(TILE, sizes, strict=True))
        case = cases.DecodeCase((0,) * 4, 32, 8, head_dim, 16)
        lowered = paged_attention_lowered(
            case, max_pages=256, num_pages=9000, config=PagedAttentionConfig(num_splits=4, **config)
        )
        attend, _ = lowering.compile_kernels(lowered, 90)
        assert attend.shared_bytes <= lowering.SMEM_LIMIT[90], config
        assert attend.stack_bytes == 0, config


def test_a_batch_invariant_call_compiles():
    lowered = paged_attention_lowered(DTYPE_CASES[0], max_pages=4096, num_pages=9000, batch_invariant=True)
    for kernel in lowering.compile_kernels(lowered, 90):
        assert kernel.stack_bytes == 0, kernel


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


@pytest.mark.parametrize(
    ("layout", "stored", "sm"),
    [("NHD", "bfloat16", 90), ("HND", "float8_e5m2", 80), ("PACKED", "int8", 100)],
)
def test_write_kv_compiles(layout, stored, sm):
    new = jax.ShapeDtypeStruct((64, 3, 80), jnp.bfloat16)
    shape = PoolShape(100, 16, 3, 80)
    pools = (
        jax.ShapeDtypeStruct(array_shape(shape, layout, w, stored), jnp.dtype(stored))
        for w in ("key", "value")
    )
    lowered = lowering.lower_for_gpu(
        functools.partial(pallas_attn.write_kv, layout=layout),
        new,
        new,
        *pools,
        jax.ShapeDtypeStruct((64,), jnp.int32),
        device=lowering.DEVICES[sm],
    )
    (kernel,) = lowering.compile_kernels(lowered, sm)
    assert kernel.stack_bytes == 0


@pytest.mark.parametrize(
    ("dim", "layout", "stored", "sm"),
    [(256, "NHD", "float8_e4m3fn", 90), (80, "HND", "float8_e5m2", 80), (80, "PACKED", "int8", 100)],
)
def test_pages_whose_scales_grow_compile(dim, layout, stored, sm):
    device = lowering.DEVICES[sm]
    lowered = triton_shapes.growing(dim, layout, stored, implementation=None, device=device)
    kernels = {kernel.name: kernel for kernel in lowering.compile_kernels(lowered, sm)}
    assert set(kernels) == {"pallas_attn_grow_pages", "pallas_attn_write_kv"}
    assert all(kernel.stack_bytes == 0 for kernel in kernels.values())
    assert "stablehlo.while" not in lowered.as_text(), (
        "a loop would have the host look at each layer's condition"
    )


def test_pools_beyond_two_to_the_31_elements_use_wide_offsets():
    """A bf16 pool above 4 GiB: element offsets no longer fit in 32 bits."""
    case = cases.DecodeCase((0,) * 4, 32, 8, 128, 16)
    num_pages = 2**31 // (16 * 8 * 128) + 1
    lowered = paged_attention_lowered(case, max_pages=256, num_pages=num_pages)
    small = paged_attention_lowered(case, max_pages=256, num_pages=1000)

    def wide(lowered) -> bool:
        _, bytecode, _, _ = lowering.triton_kernels(lowered)[0]
        return "xi64>" in lowering.triton_text(bytecode)

    assert wide(lowered)
    assert not wide(small)


def test_vmap_lowers():
    """A fourth dimension of the grid, of which Triton has three."""
    shape = jax.ShapeDtypeStruct
    pool = shape((90, 16, 2, 64), jnp.bfloat16)

    def calls(queries, keys, values, tables, lens):
        def call(query):
            return pallas_attn.paged_attention(query, keys, values, tables, lens, implementation="pallas")

        return jax.vmap(call)(queries)

    tables, lens = shape((4, 80), jnp.int32), shape((4,), jnp.int32)
    lowered = lowering.lower_for_gpu(calls, shape((3, 4, 8, 64), jnp.bfloat16), pool, pool, tables, lens)
    assert len(lowering.compile_kernels(lowered, 90)) == 2
