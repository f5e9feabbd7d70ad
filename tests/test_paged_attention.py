"""Numerics of `paged_attention` against float64 torch, on the CPU: xla, and the kernel in interpret mode."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import op_cases
import pytest
import torch
from references.paged_attention_torch import paged_attention as reference
from support import COMPILED, ON_GPU, unchecked

import pallas_attn
from pallas_attn._split import merge
from pallas_attn.ops.paged_attention.config import PagedAttentionConfig
from pallas_attn.testing import cases, compare

IMPLEMENTATIONS = ["xla", "interpret", *ON_GPU]


def served_cases() -> Iterator[Any]:
    """(case, implementation). Of cases that differ in numbers of heads, their size and the kernel's config alone,
    "xla" has one on a CPU: to plain jnp these are an array's sizes."""
    seen = set()
    for case in op_cases.of("paged_attention"):
        alike = dataclasses.replace(
            case, num_heads=2, num_kv_heads=1 + (case.group == 1), head_dim=64, config=()
        )
        # The newest jax has those that touch everything once: all are lowered on both, and features have tests below.
        marks = [] if case.fast else [pytest.mark.once]
        for implementation in ("xla", "interpret"):
            if implementation == "interpret" or case.fast or alike not in seen:
                yield pytest.param(case, implementation, marks=marks)
        seen.add(alike)
        for implementation in COMPILED:
            yield pytest.param(case, implementation, marks=[pytest.mark.gpu, *marks])


@functools.cache
def compiled(**static):
    """One function for the same options: what only differs in its data is compiled once."""
    return jax.jit(functools.partial(pallas_attn.paged_attention, return_lse=True, **static))


def run(case: cases.DecodeCase, data: inputs.PagedInputs, implementation: str, *, window=None, **options):
    """`window`: traced, beside the case's own."""
    config = None
    if implementation != "xla" and case.config:
        defaults = {"block_q": 16, "block_kv": 32, "num_splits": 1}
        if case.group * case.q_len > 16:
            defaults["block_q"] = 64
        config = PagedAttentionConfig(**{**defaults, **dict(case.config)})
    static = dict(layout=case.layout, softcap=case.softcap, block_sparse=case.block_sparse)
    windows = {"sliding_window": case.sliding_window} if window is None else {}
    call = compiled(implementation=implementation, config=config, **static, **windows, **options)
    return call(*data.arguments(), **data.extras, **({} if window is None else {"sliding_window": window}))


def check(case: cases.DecodeCase, data: inputs.PagedInputs, out, lse, **options) -> None:
    expected, expected_lse = reference(case, data, **options)
    rounded, _ = reference(case, data, rounding=getattr(torch, case.dtype), **options)
    compare.assert_rows_close(
        out,
        expected,
        dtype=case.dtype,
        case_id=case.id,
        rounded_reference=rounded,
        lengths=case.seq_lens,
        page_size=case.page_size,
    )
    compare.assert_lse_close(lse, expected_lse, dtype=case.dtype, case_id=case.id)


@pytest.mark.parametrize(("case", "implementation"), list(served_cases()), ids=lambda x: getattr(x, "id", x))
def test_matches_reference(case, implementation):
    data = inputs.make(case)
    out, lse = run(case, data, implementation)
    assert out.dtype == jnp.dtype(case.dtype)
    assert lse.dtype == jnp.float32
    check(case, data, out, lse)


# Every sequence in several splits.
CUT = cases.DecodeCase((700, 1027, 1200, 769), 4, 2, 64, 16, config=(("num_splits", 4),))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("boundary", ["first", "last", "page end", "page start", "split end", "split start"])
def test_no_boundary_token_is_lost(boundary, implementation):
    """Each sequence hides most of its weight in one token at a boundary."""
    page, split = CUT.page_size, 256
    positions = {
        "first": 0,
        "page end": 3 * page - 1,
        "page start": 3 * page,
        "split end": 2 * split - 1,
        "split start": 2 * split,
    }
    data = inputs.make(CUT)
    inputs.plant_needles(CUT, data, {s: positions.get(boundary, n - 1) for s, n in enumerate(CUT.seq_lens)})
    out, lse = run(CUT, data, implementation)
    check(CUT, data, out, lse)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("num_splits", "block_q"), [(1, 16), (4, 16), (4, 8)])
def test_bad_pages_and_lengths_poison_only_their_rows(num_splits, block_q, implementation):
    # No column is spare: every entry of sequence 4 is a good page, and only its length can tell.
    config = (("num_splits", num_splits), ("block_q", block_q))
    case = cases.DecodeCase((608,) * 8, 4, 2, 64, 16, spare_pages=0, config=config)
    data = inputs.make(case)
    num_pages = data.key_cache.shape[0]
    good, good_lse = (np.array(x) for x in run(case, data, implementation))
    data.block_tables[1, 0] = -1
    data.block_tables[2, 37] = num_pages  # the last page in use
    data.block_tables[3, 20] = 2147480000
    data.seq_lens[4] = data.block_tables.shape[1] * case.page_size + 1
    data.seq_lens[5] = -1
    data.seq_lens[6] = 2**31 - 1
    out, lse = run(case, data, implementation)
    for seq in range(8):
        if seq in (0, 7):
            # The other lengths decide how sequences are split, so bits may differ, values may not.
            np.testing.assert_allclose(np.float32(out[seq]), np.float32(good[seq]), atol=2e-2)
            np.testing.assert_allclose(lse[seq], good_lse[seq], atol=1e-4)
        else:
            assert np.isnan(np.float32(out[seq])).all(), f"sequence {seq} must be NaN"
            assert np.isnan(lse[seq]).all(), f"lse of sequence {seq} must be NaN"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_pages_shared_between_sequences(implementation):
    case = cases.DecodeCase((100, 100, 100), 4, 2, 64, 16)
    data = inputs.make(case)
    data.block_tables[1] = data.block_tables[0]
    data.block_tables[2, :3] = data.block_tables[0, :3]
    out, lse = run(case, data, implementation)
    check(case, data, out, lse)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("draft", [0, 2, 4])
def test_a_draft_is_seen_by_its_descendants_alone(draft, implementation):
    """It outweighs all other tokens for every query that sees it. The last sequence is shorter than its drafts."""
    case = cases.DecodeCase(
        (700, 300, 33, 3), 4, 2, 64, 16, q_len=5, tree="slots", config=(("num_splits", 4),)
    )
    data = inputs.make(case)
    # 0 has the children 1 and 2, and 2 has 3; 4 sees older tokens and itself alone.
    tree = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 0, 1, 1, 0], [0, 0, 0, 0, 1]]
    data.extras["tree_mask"] = np.broadcast_to(np.array(tree, bool), (4, 5, 5)).copy()
    inputs.plant_needles(
        case, data, {seq: n - 5 + draft for seq, n in enumerate(case.seq_lens) if n - 5 + draft >= 0}
    )
    out, lse = run(case, data, implementation)
    check(case, data, out, lse)


def test_a_tree_is_checked():
    case = cases.DecodeCase((20, 3), 4, 2, 16, 16, q_len=3)
    call = functools.partial(unchecked(pallas_attn.paged_attention), *inputs.make(case).arguments())
    mask = jnp.ones((2, 3, 3), bool)
    with pytest.raises(TypeError, match="'tree_mask': expected dtype bool, got int32"):
        call(tree_mask=mask.astype(jnp.int32))
    with pytest.raises(ValueError, match=r"'tree_mask': expected shape \[num_seqs=2 .*, got \[2, 3, 4\]"):
        call(tree_mask=jnp.ones((2, 3, 4), bool))
    with pytest.raises(TypeError, match="'query_positions': expected dtype int32, got float32"):
        call(tree_mask=mask, query_positions=jnp.ones((2, 3)))
    with pytest.raises(
        ValueError, match="'query_positions': expected None without 'tree_mask', got an array"
    ):
        call(query_positions=jnp.ones((2, 3), jnp.int32))


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_positions_outside_the_newest_slots_count_as_the_nearest(implementation):
    case = cases.DecodeCase((40, 2), 4, 2, 16, 16, q_len=3, tree="positions", alibi=True, sliding_window=4)
    data = inputs.make(case)
    far, near = data.copy(), data.copy()
    far.extras["query_positions"] = np.array([[-7, 38, 2**31 - 1], [-(2**31), 1, 9]], np.int32)
    near.extras["query_positions"] = np.array([[37, 38, 39], [0, 1, 1]], np.int32)
    for a, b in zip(run(case, far, implementation), run(case, near, implementation), strict=True):
        np.testing.assert_array_equal(np.float32(a), np.float32(b))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_scale(implementation):
    case = cases.DecodeCase((5, 77), 4, 2, 64, 16, "float32")
    data = inputs.make(case)
    out, lse = run(case, data, implementation, scale=0.37)
    check(case, data, out, lse, scale=0.37)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "step", [{"head_sliding_step": 2**30}, {"head_sliding_step": 7, "tp_rank": 2**29}], ids=str
)
def test_steps_of_a_pattern_beyond_int32(step, implementation):
    pattern = pallas_attn.LocalStride(16, 1, 11, **step)
    case = cases.DecodeCase((300, 77), 4, 1, 32, 16, "float32", block_sparse=pattern)
    data = inputs.make(case)
    check(case, data, *run(case, data, implementation))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_largest_soft_cap(implementation):
    """Logits over it are not so small that they become 0."""
    case = cases.DecodeCase((5, 77), 4, 2, 64, 16, "float32", softcap=1e30)
    data = inputs.make(case)
    check(case, data, *run(case, data, implementation))


@pytest.mark.once
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_flat_fp16_scores_stay_finite(implementation):
    """8192 equal logits: a partial sum kept unnormalised in fp16 would overflow."""
    case = cases.DecodeCase((8192,), 2, 1, 64, 16, "float16", config=(("num_splits", 2),))
    data = inputs.make(case)
    data.query[:] = 0
    data.value_cache[~np.isnan(data.value_cache)] = 8.0
    out, lse = run(case, data, implementation)
    np.testing.assert_array_equal(np.float32(out), 8.0)
    np.testing.assert_allclose(lse, np.log(8192), rtol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_same_inputs_same_bits(implementation):
    data = inputs.make(CUT)
    first, second = (run(CUT, data, implementation) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.once
def test_few_programs_merge_what_many_would(monkeypatch):
    """Some of them several sequences, some none."""
    case = cases.DecodeCase((200, 5, 90, 0, 170, 64, 150), 4, 2, 16, 16, lengths="uneven", spare_pages=0)
    arguments = inputs.make(case).arguments()

    def merged(at_once: int, num_warps: int):
        """Warps are nothing in Python, but make it another kernel: what is patched is not part of one."""
        monkeypatch.setattr(merge, "AT_ONCE", {1: at_once, 4: at_once})
        config = PagedAttentionConfig(16, 16, min_split_tokens=32, target_programs=24, num_warps=num_warps)
        call = functools.partial(pallas_attn.paged_attention, implementation="interpret", config=config)
        return call(*arguments, return_lse=True)

    for few, many in zip(merged(at_once=12, num_warps=2), merged(at_once=512, num_warps=4), strict=True):
        np.testing.assert_array_equal(few, many)


def test_inside_scan_and_while_loop():
    """A decode loop: lengths and query are loop state, nothing is read by the host."""
    case = cases.DecodeCase((20, 33), 4, 2, 64, 16, "float32")
    data = inputs.make(case)
    query, *cache, tables, lens = data.arguments()

    @jax.jit
    def shrink(query, lens):
        def step(state, _):
            out = pallas_attn.paged_attention(query, *cache, tables, state)
            return state - 1, out

        return jax.lax.scan(step, lens, None, length=3)[1]

    outs = shrink(query, lens)
    for i in range(3):
        shorter = inputs.PagedInputs(**{**vars(data), "seq_lens": data.seq_lens - i})
        np.testing.assert_allclose(outs[i], reference(case, shorter)[0], rtol=1e-4, atol=1e-5)


def test_reference_does_not_gather_the_whole_table():
    """The xla implementation's memory follows its chunk, not the width of the block table."""
    page, heads, dim = 16, 4, 64

    def temporary_bytes(max_pages: int) -> int:
        shapes = [
            jax.ShapeDtypeStruct((2, heads, dim), jnp.float32),
            *[jax.ShapeDtypeStruct((max_pages, page, heads, dim), jnp.float32)] * 2,
            jax.ShapeDtypeStruct((2, max_pages), jnp.int32),
            jax.ShapeDtypeStruct((2,), jnp.int32),
        ]
        call = functools.partial(pallas_attn.paged_attention, implementation="xla")
        return jax.jit(call).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(4096) < 2 * temporary_bytes(64)


@pytest.mark.once
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "edge", ["oldest in the window", "newest of a remote block", "oldest of a local block"]
)
def test_no_token_at_the_edge_of_a_rule_is_lost(edge, implementation):
    base = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 16}
    if edge == "oldest in the window":
        case = cases.DecodeCase((700, 1027), **base, sliding_window=300, config=(("num_splits", 4),))
        positions = {0: 700 - 300, 1: 1027 - 300}
    else:
        pattern = pallas_attn.LocalStride(64, 2, 4)  # keeps blocks 3, 7, 11, ... and the last two
        tiles = (("block_kv", 32), ("num_splits", 4))
        case = cases.DecodeCase((700, 1027), **base, block_sparse=pattern, config=tiles)
        newest, oldest = {0: 8 * 64 - 1, 1: 12 * 64 - 1}, {0: (699 // 64 - 1) * 64, 1: (1026 // 64 - 1) * 64}
        positions = newest if "newest" in edge else oldest
    data = inputs.make(case)
    inputs.plant_needles(case, data, positions)
    out, lse = run(case, data, implementation)
    check(case, data, out, lse)


@pytest.mark.once
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rule", ["window", "block-sparse"])
def test_pages_that_no_query_sees_may_be_anyones(rule, implementation):
    """Serving systems free the pages behind a window: their table entries are garbage, their slots NaN."""
    sparse = pallas_attn.LocalStride(64, 1, 4)
    options = {"sliding_window": 100} if rule == "window" else {"block_sparse": sparse}
    case = cases.DecodeCase(
        (700, 0, 1027), 4, 2, 64, 16, **options, config=(("block_kv", 32), ("num_splits", 4))
    )
    data = inputs.make(case)
    expected = data.copy()
    for seq, length in enumerate(case.seq_lens):
        seen = inputs.visible(case, length).any(axis=(0, 1))
        for column in range(-(-length // case.page_size)):
            if not seen[column * case.page_size : (column + 1) * case.page_size].any():
                data.block_tables[seq, column] = inputs.GARBAGE_IDS[column % len(inputs.GARBAGE_IDS)]
    out, lse = run(case, data, implementation)
    check(case, expected, out, lse)


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_with_64_bit_types_enabled(implementation):
    """Users may compute in float64 beside it."""
    case = cases.DecodeCase((20, 3), 4, 2, 16, 16)
    data = inputs.make(case)
    with jax.enable_x64(True):
        out, lse = run(case, data, implementation)
    check(case, data, out, lse)


@pytest.mark.once
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_sink_far_above_the_logits(implementation):
    """It takes nearly all of the weight; what is left to the keys must not be rounded to zero on the way."""
    splits = (("num_splits", 3), ("min_split_tokens", 16))
    case = cases.DecodeCase((65, 3), 4, 2, 32, 16, cache_dtype="float8_e4m3fn", sinks=True, config=splits)
    data = inputs.make(case)
    for sink in (14.0, 20.0):
        data.extras["sinks"] = np.full(4, sink, np.float32)
        check(case, data, *run(case, data, implementation))


@pytest.mark.once
@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_windows_of_any_int(implementation):
    case = cases.DecodeCase((20, 3), 4, 2, 16, 16)
    data = inputs.make(case)
    call = functools.partial(
        unchecked(pallas_attn.paged_attention), *data.arguments(), implementation=implementation
    )
    np.testing.assert_array_equal(call(sliding_window=np.int64(3)), call(sliding_window=3))
    for more in (2**31 - 1, 2**40):
        np.testing.assert_array_equal(call(sliding_window=more), call(sliding_window=20))
    with pytest.raises(TypeError, match="'sliding_window': expected an int, got True of type bool"):
        call(sliding_window=True)
    with pytest.raises(ValueError, match="'sliding_window': expected at least 1, got 0"):
        call(sliding_window=0)


WINDOWS = (300, 1, 100)


def in_a_scan_over_layers(case: cases.DecodeCase, data: inputs.PagedInputs, implementation: str):
    """(out, lse) of each of WINDOWS; what lies outside of every window is poison."""

    @jax.jit
    def layers(windows):
        def layer(carry, window):
            return carry, run(case, data, implementation, window=window)

        return jax.lax.scan(layer, None, windows)[1]

    return zip(*layers(jnp.array(WINDOWS, jnp.int32)), strict=True)


def windowed(**options) -> cases.DecodeCase:
    splits = (("num_splits", 4), ("block_kv", 32), ("min_split_tokens", 64))
    lengths = (700, 0, 1027, 33)
    return cases.DecodeCase(lengths, 4, 2, 64, 16, sliding_window=max(WINDOWS), config=splits, **options)


@pytest.mark.once
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_traced_window_is_the_static_one(implementation):
    case = windowed()
    data = inputs.make(case)
    traced = [*in_a_scan_over_layers(case, data, implementation)]
    for window, (out, lse) in zip(WINDOWS, traced, strict=True):
        check(dataclasses.replace(case, sliding_window=window), data, out, lse)
    for mine, static in zip(traced[0], run(case, data, implementation), strict=True):
        np.testing.assert_array_equal(np.float32(mine), np.float32(static))


@pytest.mark.once
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "options", [{"q_len": 3}, {"block_sparse": pallas_attn.LocalStride(32, 1, 4)}], ids=str
)
def test_a_traced_window_beside_other_rules(options, implementation):
    case = windowed(**options)
    data = inputs.make(case)
    for window, result in zip(WINDOWS, in_a_scan_over_layers(case, data, implementation), strict=True):
        check(dataclasses.replace(case, sliding_window=window), data, *result)


def test_a_traced_window_is_checked():
    case = cases.DecodeCase((20, 3), 4, 2, 16, 16)
    call = functools.partial(unchecked(pallas_attn.paged_attention), *inputs.make(case).arguments())
    with pytest.raises(TypeError, match="'sliding_window': expected dtype int32, got float32"):
        call(sliding_window=jnp.float32(3))
    with pytest.raises(ValueError, match=r"'sliding_window': expected shape \[\], got \[1\]"):
        call(sliding_window=jnp.ones(1, jnp.int32))
    for below in (0, -5, -(2**31)):
        got = call(sliding_window=jnp.int32(below), implementation="interpret")
        np.testing.assert_array_equal(got, call(sliding_window=1, implementation="interpret"))
