"""The vectorised tile scheduler against a plain model, and the properties that kernels rely on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from references.mla_schedule_model import BLOCK, OVERHEAD, plain_schedule
from support import unchecked

from pallas_attn._split import splits
from pallas_attn.ops.mla_decode import schedule as sched

# Few shapes, so that few programs are compiled; lengths and parts are what the property is about.
BATCHES, PARTS = (1, 3, 33), (1, 7, 66, 132)
SHORT = st.one_of(
    st.integers(0, 3 * BLOCK), st.sampled_from([0, 1, BLOCK, BLOCK + 1, 320, 640]), st.integers(0, 20_000)
)


@functools.partial(jax.jit, static_argnums=(1, 2))
def compiled(seq_lens, num_parts, overhead):
    return sched.tile_schedule(seq_lens, num_parts, overhead)


@st.composite
def problems(draw):
    batch = draw(st.sampled_from(BATCHES))
    lengths = draw(st.lists(SHORT, min_size=batch, max_size=batch))
    return lengths, draw(st.sampled_from(PARTS))


def check(lengths, num_parts, overhead=OVERHEAD):
    rows, splits, payload = plain_schedule(lengths, num_parts, overhead)
    metadata, num_splits = compiled(jnp.asarray(lengths, jnp.int32), num_parts, overhead)
    np.testing.assert_array_equal(num_splits, splits)
    np.testing.assert_array_equal(metadata, rows)
    check_cover(np.asarray(metadata), np.asarray(num_splits), lengths, payload, overhead)


def check_cover(metadata, num_splits, lengths, payload, overhead):
    """Every block is dealt once, every split has a number of its own, no part exceeds its payload."""
    dealt = [[] for _ in lengths]
    seen = set()
    for begin, begin_token, end, end_token, first_split, *_ in metadata:
        if begin == len(lengths):
            continue
        cost = 0
        for seq in range(begin, end + 1):
            first = begin_token if seq == begin else 0
            last = end_token if seq == end else lengths[seq]
            blocks = range(first // BLOCK, -(-last // BLOCK))
            dealt[seq] += blocks
            cost += len(blocks) + overhead
            split = num_splits[seq] + (first_split if seq == begin else 0)
            assert num_splits[seq] <= split < num_splits[seq + 1]
            assert split not in seen
            seen.add(split)
        assert cost <= payload
    assert dealt == [list(range(-(-n // BLOCK))) for n in lengths]
    check_slots(num_splits, len(metadata))
    assert len(seen) == num_splits[-1]


def check_slots(num_splits, num_parts):
    """Each partial result has a place of its own, and two for each part are enough."""
    room = splits.scheduled_places(num_parts)
    used = np.zeros(room, int)
    for seq, count in enumerate(np.diff(num_splits)):
        if count > 1:
            first = 2 * (num_splits[seq] - seq)
            assert first + count <= room
            used[first : first + count] += 1
    assert used.max() <= 1


@pytest.mark.once  # test_edges has the newest jax compute schedules
@settings(max_examples=1000, deadline=None)
@given(problems())
@pytest.mark.slow
def test_equals_the_plain_model(problem):
    check(*problem)


@pytest.mark.parametrize("num_parts", PARTS)
@pytest.mark.parametrize(
    "lengths",
    [[0] * 33, [1] * 33, [64 * 5] * 8, [32768], [0, 4096, 0], [4096] * 33, [100_000] + [1] * 32, [0]],
    ids=str,
)
def test_edges(lengths, num_parts):
    check(lengths, num_parts)


@pytest.mark.slow
@pytest.mark.once
@settings(max_examples=100, deadline=None)
@given(problems(), st.sampled_from([1, 2]))
def test_other_overheads(problem, overhead):
    lengths, num_parts = problem
    check(lengths, num_parts, overhead)


@pytest.mark.once
@pytest.mark.parametrize(
    ("num_seqs", "num_tokens", "num_parts", "rows", "whole"),
    [
        (128, 1024, 132, 16, True),
        (128, 8192, 132, 16, True),
        (128, 16384, 132, 64, True),
        (128, 32768, 132, 16, False),  # cutting saves 16 blocks a part
        (128, 16384, 66, 128, True),  # two for each part
        (128, 16384, 33, 256, False),
        (64, 1024, 132, 16, False),  # whole, they would leave half of the parts idle
        (1, 32768, 132, 16, False),
    ],
)
def test_sequences_of_like_length_stay_whole_where_that_is_faster(
    num_seqs, num_tokens, num_parts, rows, whole
):
    lengths = num_tokens - np.arange(num_seqs) % 50
    seq_lens = jnp.asarray(lengths, jnp.int32)
    overhead = int(sched.default_overhead(seq_lens, num_parts, rows))
    check(lengths.tolist(), num_parts, overhead)
    num_splits = compiled(seq_lens, num_parts, overhead).num_splits
    assert (int(num_splits[-1]) == num_seqs) == whole


@pytest.mark.once
@pytest.mark.parametrize("num_parts", [132, 66])
@pytest.mark.parametrize("shortest", [1024, 2048, 4096, 8192])
def test_the_lengths_of_flash_mlas_benchmark_stay_whole(shortest, num_parts):
    """An overhead that only lets the longest fit would leave parts with short ones room for a split of the next."""
    lengths = shortest + 2 * np.arange(128)
    seq_lens = jnp.asarray(lengths, jnp.int32)
    overhead = int(sched.default_overhead(seq_lens, num_parts, {132: 16, 66: 128}[num_parts]))
    check(lengths.tolist(), num_parts, overhead)
    assert int(compiled(seq_lens, num_parts, overhead).num_splits[-1]) == 128


@pytest.mark.parametrize(
    ("lengths", "num_parts", "rows", "expected"),
    [
        (1024 + 2 * np.arange(128), 128, 16, 2),  # no part to spare: splits are cut whatever the overhead
        (1024 + 2 * np.arange(264), 132, 16, 5),
        (np.arange(128) * 8 + 1, 132, 64, 2),  # few blocks apart, but twice the mean
        (np.where(np.arange(128) < 60, 0, 1024), 66, 128, 5),
    ],
)
def test_lengths_that_are_cut_anyway_or_not_alike_get_the_low_overhead(lengths, num_parts, rows, expected):
    assert int(sched.default_overhead(jnp.asarray(lengths, jnp.int32), num_parts, rows)) == expected


def test_the_default_overhead_of_varying_lengths():
    lengths = jnp.asarray(np.random.default_rng(0).normal(4096, 2048, 128).clip(1), jnp.int32)
    assert [int(sched.default_overhead(lengths, parts, 64)) for parts in (132, 66)] == [2, 5]
    assert sched.default_overhead(lengths[:8], 132, 16) == 1
    metadata, num_splits = jax.jit(lambda lens: sched.mla_schedule(lens, num_heads=16, num_parts=132))(
        lengths
    )
    expected = compiled(lengths, 132, 2)
    np.testing.assert_array_equal(metadata, expected.tile_scheduler_metadata)
    np.testing.assert_array_equal(num_splits, expected.num_splits)


def test_a_batch_of_128():
    rng = np.random.default_rng(0)
    check([max(1, int(n)) for n in rng.normal(4096, 2048, 128)], 132)


def test_parts_that_fill_a_device():
    # The seed's rule: multiprocessors / KV heads / blocks of 64 query rows.
    assert sched.num_sm_parts(16, 1, 132) == 132
    assert sched.num_sm_parts(128, 1, 132) == 66
    assert sched.num_sm_parts(65, 2, 132) == 33
    assert sched.num_sm_parts(256, 64, 132) == 1


def test_arguments_are_checked():
    lens = jnp.ones(3, jnp.int32)
    mla_schedule = unchecked(sched.mla_schedule)
    with pytest.raises(TypeError, match="mla_schedule: argument 'seq_lens': expected dtype int32"):
        mla_schedule(lens.astype(jnp.float32), num_heads=16)
    with pytest.raises(ValueError, match="argument 'num_heads': expected a multiple of num_kv_heads"):
        sched.mla_schedule(lens, num_heads=16, num_kv_heads=3)
    with pytest.raises(ValueError, match="argument 'num_parts': expected at least 1, got 0"):
        sched.mla_schedule(lens, num_heads=16, num_parts=0)
    with pytest.raises(ValueError, match="argument 'q_len': expected at least 1, got 0"):
        sched.mla_schedule(lens, num_heads=16, q_len=0)
    with pytest.raises(TypeError, match=r"argument 'num_parts': expected an int, got 3\.5 of type float"):
        mla_schedule(lens, num_heads=16, num_parts=3.5)
