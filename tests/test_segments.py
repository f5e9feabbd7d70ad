"""Tables of documents, against what they say in words."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from lowering import lower_for_four, lower_for_gpu
from support import as_if_cuda

import pallas_attn
from pallas_attn.ops.flash_attention import segments, segments_cuda


def spans(rank: np.ndarray) -> dict[int, tuple[int, int, int]]:
    """{rank: (first token, one behind the last, whether all between are of it)}."""
    found = {}
    for number in np.unique(rank).tolist():
        at = np.flatnonzero(rank == number)
        first, end = int(at[0]), int(at[-1]) + 1
        found[number] = first, end, int(end - first == len(at))
    return found


def check(side: segments.Documents) -> None:
    for rank, table in zip(*map(np.array, side), strict=True):
        expected = spans(rank)
        assert {i: tuple(table[i].tolist()) for i in expected} == expected
        others = np.delete(table, list(expected), axis=0)
        assert (others[:, 0] >= others[:, 1]).all()  # empty


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(("queries", "keys", "kinds"), [(7, 7, 3), (60, 33, 5), (1, 50, 9), (64, 64, 200)])
def test_ids_become_ranks_and_spans(queries, keys, kinds, ordered):
    rng = np.random.default_rng(0)
    of_queries, of_keys = (
        rng.integers(-3, kinds, (2, tokens)).astype(np.int32) for tokens in (queries, keys)
    )
    if ordered:
        of_queries.sort(axis=1)
        of_keys.sort(axis=1)
    query_ids = jnp.asarray(of_queries)
    find = functools.partial(segments.sides, implementation="xla")
    apart, alike = jax.jit(find)(of_queries, of_keys), find(query_ids, query_ids)
    for (q_rank, q_table), (kv_rank, kv_table), key_ids in ((*apart, of_keys), (*alike, of_queries)):
        check(segments.Documents(q_rank, q_table))
        check(segments.Documents(kv_rank, kv_table))
        ours, theirs = np.array(q_rank)[:, :, None], of_queries[:, :, None]
        np.testing.assert_array_equal(ours == kv_rank[:, None], theirs == key_ids[:, None])
        np.testing.assert_array_equal(ours < kv_rank[:, None], theirs < key_ids[:, None])


@pytest.mark.parametrize("lens", [(0, 9), (0, 3, 3, 7), (2, 5, 8), (0, 0, 12), (0,), (4, 4)])
def test_sequences_end_to_end(lens):
    tokens = 9
    of_queries, of_keys = segments.sides_of_lengths(jnp.array(lens, jnp.int32), tokens)
    if len(lens) > 1 and lens[-1] <= tokens:
        for (rank, table), side in zip((of_queries, of_keys), "qk", strict=True):
            for number, (first, end, solid) in spans(np.array(rank)[0]).items():
                # Padding has no keys; as queries it lies in front of the sequences or behind them, each a rank.
                expected = (first, end, solid) if side == "q" or number < len(lens) - 1 else (tokens, 0, 1)
                assert tuple(np.array(table)[0, number].tolist()) == expected, side
    at = np.arange(tokens)
    seq = np.searchsorted(lens, at, side="right")
    held = (at >= lens[0]) & (at < lens[-1])
    same = (seq[:, None] == seq[None, :]) & held[:, None] & held[None, :]
    np.testing.assert_array_equal(np.array(of_queries.rank)[0][:, None] == np.array(of_keys.rank)[0], same)


@pytest.mark.parametrize("names", [segments.SIZES[:1], segments.SIZES[1:], segments.SIZES])
def test_lengths_in_front_of_padding(names):
    tokens = dict(zip(segments.SIZES, (9, 7), strict=True))
    lens = {name: np.array([0, 3, tokens[name], 99, -2], np.int32) for name in names}
    sides = segments.sides_of_sizes({name: jnp.asarray(lens[name]) for name in names}, tokens)
    held = []
    for side, (name, most) in zip(sides, tokens.items(), strict=True):
        check(side)
        held.append(np.arange(most) < lens.get(name, np.full(5, most))[:, None])
    same = held[0][:, :, None] & held[1][:, None, :]
    np.testing.assert_array_equal(
        np.array(sides[0].rank)[:, :, None] == np.array(sides[1].rank)[:, None], same
    )


@pytest.mark.parametrize("lens", [(5, 2, 9), (-7, 4, 30), (9, 0), (2**31 - 1, -(2**31))])
def test_lengths_that_cannot_be_right_stay_inside(lens):
    for rank, table in segments.sides_of_lengths(jnp.array(lens, jnp.int32), 9):
        assert ((np.array(rank) >= 0) & (np.array(rank) < table.shape[1])).all()
        assert ((np.array(table)[..., :2] >= 0) & (np.array(table)[..., :2] <= 9)).all()


def test_what_is_known_of_lengths_needs_no_sort():
    def text(function, *arguments):
        return jax.jit(function).lower(*arguments).as_text()

    ids = jnp.zeros((1, 32), jnp.int32)
    assert text(lambda ids: segments.sides(ids, ids, "xla"), ids).count("stablehlo.sort") == 1
    lengths = text(lambda lens: segments.sides_of_lengths(lens, 32), jnp.zeros(4, jnp.int32))
    assert not [word for word in ("sort", "scatter", "while") if f"stablehlo.{word}" in lengths]


def lowered(ids, **options) -> str:
    rows = jax.ShapeDtypeStruct((*ids.shape, 4, 128), jnp.bfloat16)
    attend = functools.partial(pallas_attn.flash_attention, **options)
    return lower_for_gpu(lambda x, ids: attend(x, x, x, segment_ids=ids), rows, ids).as_text()


@pytest.mark.parametrize(
    ("implementation", "tokens", "by_cuda"),
    [
        (None, 4096, True),
        ("cuda", 64, True),
        ("pallas", 4096, False),
        ("xla", 64, False),
        (None, segments_cuda.FASTER_UP_TO, True),
        (None, segments_cuda.FASTER_UP_TO + 128, False),
    ],
)
def test_cuda_finds_documents_of_its_own_calls(monkeypatch, implementation, tokens, by_cuda):
    """And of those that leave the choice; of longer rows a sort does."""
    as_if_cuda(monkeypatch)
    text = lowered(jax.ShapeDtypeStruct((1, tokens), jnp.int32), implementation=implementation)
    assert text.count(f"custom_call @{segments_cuda.TARGET}") == by_cuda
    assert ("stablehlo.sort" in text) != by_cuda


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Manual], ids=str)
def test_each_device_finds_its_own_documents(monkeypatch, axis_type):
    as_if_cuda(monkeypatch)
    ids, specs = [jax.ShapeDtypeStruct((8, 256), jnp.int32)], [PartitionSpec("x")]
    text = lower_for_four(lambda ids: (segments.sides(ids, ids)[0].rank,), ids, specs, specs, axis_type)
    [call] = [line for line in text.splitlines() if f"@{segments_cuda.TARGET}(" in line]
    assert "(tensor<4x256xi32>, tensor<4x256x3xi32>" in call
