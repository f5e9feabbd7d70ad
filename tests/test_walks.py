"""What walks and split rules make the GPU do, as numbers: tiles visited, splits made. Right results do not show it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import LocalStride, MLADecodeConfig, PagedAttentionConfig
from pallas_attn._call.pools import PoolShape
from pallas_attn._split import merge, splits
from pallas_attn._tile.latents import QUERY_DIM
from pallas_attn._tile.masking import Rules
from pallas_attn.ops.mla_decode.problem import Problem as MLAProblem
from pallas_attn.ops.paged_attention.problem import Problem as PagedProblem

PAGE, TILE = 16, 32

pytestmark = pytest.mark.usefixtures("refs_are_arrays")


def paged(num_seqs=1, q_len=1, heads=(4, 2), *, max_pages=256, rules=None, **config) -> PagedProblem:
    sizes = {"block_q": 16, "block_kv": TILE, "num_splits": 1, **config}
    return PagedProblem(
        num_seqs=num_seqs,
        q_len=q_len,
        num_heads=heads[0],
        max_pages=max_pages,
        pool=PoolShape(1, PAGE, heads[1], 64),
        scale=1.0,
        config=PagedAttentionConfig(**sizes),
        layout="NHD",
        rules=rules or Rules(),
    )


def latent(num_seqs: int, *, num_heads=16, max_pages=512, **config) -> MLAProblem:
    block_q = min(64, num_heads)
    sizes = {"num_splits": 128, "min_split_tokens": 64, "target_programs": 132, **config}
    return MLAProblem(
        num_seqs=num_seqs,
        q_len=1,
        num_heads=num_heads,
        max_pages=max_pages,
        pool=PoolShape(1, 64, 1, QUERY_DIM),
        scale=1.0,
        config=MLADecodeConfig(block_q, 64, **sizes),
        causal=False,
        num_parts=None,
    )


def visited(problem: PagedProblem, seq_len: int, kv_head: int = 0) -> list[int]:
    """First tokens of the tiles of a walk."""
    walk = problem.walk(jnp.int32(seq_len), kv_head)
    return [int(walk.start(jnp.int32(tile))) for tile in range(int(walk.num_tiles))]


def made(problem, lengths) -> list[int]:
    """Splits of each sequence; one for those that are final at once."""
    count = [0] * len(lengths)
    for split in dealt(problem, lengths):
        count[int(split.seq)] += 1
    return count


def dealt(problem, lengths) -> list[splits.Split]:
    """The splits of all work items."""
    num, *numbers = _at_all_items(problem, jnp.asarray(lengths, jnp.int32))
    assert num <= problem.num_items
    return [splits.Split(*one) for one in np.stack(numbers, 1)[:num]]


@functools.partial(jax.jit, static_argnums=0)
def _at_all_items(problem, lengths):
    found = splits.fair(problem, lengths)
    items = jnp.arange(problem.num_items)
    at = jax.vmap(lambda item: jax.tree.map(lambda x: x + 0 * item, found.at(item)))(items)
    return found.num(), *at


@pytest.mark.parametrize("length", [0, 1, TILE, TILE + 1, 1000])
def test_a_dense_walk_takes_each_tile_once(length):
    assert visited(paged(), length) == list(range(0, length, TILE))


@pytest.mark.parametrize(
    ("length", "q_len", "window", "expected"),
    [
        (1000, 1, 100, [896, 928, 960, 992]),  # tokens 900 to 999
        (1000, 1, 1, [992]),
        (1000, 3, 100, [896, 928, 960, 992]),  # the oldest query, 997, sees token 898 on
        (1000, 8, 100, [864, 896, 928, 960, 992]),  # 992 sees 893 on
        (1000, 1, 5000, list(range(0, 1000, TILE))),
        (40, 1, 100, [0, 32]),
        (0, 1, 100, []),
    ],
)
def test_a_window_is_walked_from_its_first_token(length, q_len, window, expected):
    for size in (window, jnp.int32(window)):
        assert visited(paged(q_len=q_len, rules=Rules(sliding_window=size)), length) == expected


def test_a_block_sparse_walk_leaves_other_blocks_out():
    pattern = LocalStride(64, 2, 4)  # blocks 3, 7, 11, ... and the newest two
    # The last period's block lies in the local band: its tokens are masked there, so nothing is read twice.
    expected = [block * 64 + part for block in (3, 7, 11, 15, 14, 15) for part in (0, TILE)]
    assert visited(paged(rules=Rules(block_sparse=pattern)), 1000) == expected


def test_a_pattern_that_differs_by_head_is_walked_by_head():
    pattern = LocalStride(64, 1, 4, -1)  # KV head h keeps blocks j with (j + h + 1) % 4 == 0
    problem = paged(rules=Rules(block_sparse=pattern))
    remote = {head: visited(problem, 1000, head)[:-2] for head in (0, 1)}
    assert remote[0] == [block * 64 + part for block in (3, 7, 11, 15) for part in (0, TILE)]
    assert remote[1] == [block * 64 + part for block in (2, 6, 10, 14) for part in (0, TILE)]


LARGE_STEPS = [
    LocalStride(16, 1, 7, 2**30),
    LocalStride(16, 1, 7, -(2**30), tp_rank=2**30),
    LocalStride(16, 1, 5, 7, tp_rank=2**29),
    LocalStride(16, 1, 2**26 - 5, 2**30, tp_rank=2**30),
    LocalStride(16, 1, 2**26, 2**26 - 1),
]


@pytest.mark.parametrize("pattern", LARGE_STEPS, ids=str)
def test_a_pattern_moves_by_any_step(pattern):
    """Of which int32 does not hold the products: only whole strides may be left out."""
    heads, kv_heads = 64, 32
    head = np.arange(heads)

    @jax.jit
    def offset(head):
        return pattern.offset(head, head // 2, num_heads=heads, num_kv_heads=kv_heads)

    found, step, rank = offset(head), pattern.head_sliding_step, pattern.tp_rank
    place = rank * heads + head if step >= 0 else rank * kv_heads + head // 2
    right = [(int(i) * abs(step) + 1) % pattern.vert_stride for i in place]
    np.testing.assert_array_equal(found % pattern.vert_stride, right)
    # Nor may the sum with a block's number be too large.
    assert min(found) >= 0
    assert max(found) < 2**31 - 2**31 // pattern.block_size


def test_a_window_ends_a_block_sparse_walk():
    pattern, window = LocalStride(64, 1, 4), 300  # tokens 700 to 999: blocks 10 to 15
    starts = visited(paged(rules=Rules(window, None, pattern)), 1000)
    assert starts == [block * 64 + part for block in (11, 15, 15) for part in (0, TILE)]


def test_a_long_sequence_is_cut_and_short_ones_are_not():
    problem = paged(4, num_splits=16, min_split_tokens=64, target_programs=32, max_pages=512)
    # 16 begin at once, three of them for the short ones.
    assert made(problem, [8064, 64, 64, 64]) == [13, 1, 1, 1]


@pytest.mark.parametrize("most", [1, 2, 5, 64])
def test_as_many_splits_as_the_config_allows(most):
    problem = paged(num_splits=most, min_split_tokens=64, target_programs=1000)
    assert made(problem, [4096]) == [most]


def test_no_split_is_shorter_than_the_config_says():
    problem = paged(num_splits=64, min_split_tokens=256, target_programs=1000)
    assert made(problem, [2048]) == [8]
    assert made(problem, [200]) == [1]


def test_shares_are_rounded_as_the_op_says():
    """2.75 shares: three splits where programs share a multiprocessor, two where each fills one."""
    lengths = [11 * 64] * 4
    near = paged(4, heads=(1, 1), block_kv=64, num_splits=8, min_split_tokens=64, target_programs=11)
    assert made(near, lengths) == [3] * 4
    assert made(latent(4, num_splits=8, target_programs=11), lengths) == [2] * 4


def test_equal_lengths_have_shares_to_the_nearest_number():
    problem = paged(4, heads=(1, 1), num_splits=0, min_split_tokens=64, target_programs=9, max_pages=4096)
    assert made(problem, [2048] * 4) == [2] * 4
    assert made(problem, [40] * 4) == [1] * 4, "none is shorter than the shortest that there may be"


@pytest.mark.parametrize("growth", [1.08, 1.05, 1.03])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_splits_of_uneven_lengths_begin_at_once_and_are_hardly_above_a_share(growth, kv_heads):
    lengths = np.array([1000 * growth**i for i in range(64)], np.int32)
    problem = paged(64, heads=(8, kv_heads), num_splits=0, target_programs=512 * kv_heads, max_pages=16384)
    tiles = np.ceil(lengths / TILE)
    count = np.asarray(splits.cuts(jnp.asarray(lengths), problem)) + 1
    assert sum(count) <= 512
    assert max(tiles / count) < 1.13 * sum(tiles) / 512


@pytest.mark.parametrize("num_seqs", [3, 40, 100, 200])
def test_no_split_of_uneven_lengths_has_more_than_two_shares(num_seqs):
    """Nor 1.5 of them, to the nearest number, where sequences alone are more than begin at once."""
    lengths = np.random.default_rng(num_seqs).exponential(3000, num_seqs).astype(np.int32)
    problem = paged(
        num_seqs, heads=(1, 1), num_splits=0, min_split_tokens=32, target_programs=128, max_pages=4096
    )
    tiles = np.ceil(lengths / TILE)
    count = np.asarray(splits.cuts(jnp.asarray(lengths), problem)) + 1
    most = 2 if sum(count) <= 128 else 1.5
    assert max(np.ceil(tiles / count)) <= np.ceil(most * sum(tiles) / 128) + 1
    assert sum(count - 1) <= problem.most_cuts


LENGTHS = {
    "one giant": [60000, *range(100, 800, 11)],
    "last is longest": [64] * 40 + [9000],
    "one": [32768],
    "equal": [4096] * 9,
    "equal and many": [500] * 130,
    "equal, of one tile": [3] * 5,
    "equal in tiles": [TILE * 70 - i for i in range(7)],
    "empty ones": [0, 5000, 0, 0, 3000, 0],
    "all empty": [0, 0, 0],
    "many": [17 * i % 3001 for i in range(200)],
}


CUT = {
    "paged": lambda num: paged(num, target_programs=100, num_splits=0, max_pages=4096),
    "paged, fixed": lambda num: paged(
        num, target_programs=100, num_splits=0, max_pages=4096, split_tokens=256
    ),
    "latents": lambda num: latent(num, num_splits=0, target_programs=100, max_pages=1024),
}


@pytest.mark.once
@pytest.mark.parametrize("kind", CUT)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_every_tile_is_in_one_split_and_every_split_in_a_place_of_its_own(lengths, kind):
    lengths = LENGTHS[lengths]
    problem = CUT[kind](len(lengths))
    served = {seq: [] for seq in range(len(lengths))}
    places = []
    for split in dealt(problem, lengths):
        seq, count = int(split.seq), int(split.count)
        begin, end = (int(x) for x in split.tiles(problem.num_tiles(jnp.int32(lengths[seq]))))
        served[seq].append((int(split.index), begin, end))
        if count > 1:
            places.append(int(split.place))
    assert len(set(places)) == len(places)
    assert all(0 <= place < problem.num_places for place in places)
    for seq, length in enumerate(lengths):
        parts = sorted(served[seq])
        assert [index for index, _, _ in parts] == list(range(len(parts)))
        ends = [0, *(end for _, _, end in parts)]
        assert [begin for _, begin, _ in parts] == ends[:-1]
        assert ends[-1] == -(-length // problem.config.block_kv)
        assert len(parts) == 1 or all(begin < end for _, begin, end in parts)


@pytest.mark.once
@pytest.mark.parametrize("kind", ["paged", "latents"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_what_is_merged_is_what_was_cut(lengths, kind):
    lengths = LENGTHS[lengths]
    problem = CUT[kind](len(lengths))
    stored: dict[int, list[int]] = {}
    for split in dealt(problem, lengths):
        if int(split.count) > 1:
            stored.setdefault(int(split.seq), []).append(int(split.place))
    found = splits.FairSplits(problem, jnp.asarray(lengths, jnp.int32))
    merged = {}
    cut_of = jax.jit(found.cut)
    for which in range(problem.most_cut):
        seq, first, count = map(int, cut_of(jnp.int32(which)))
        if count > 1:
            merged[seq] = list(range(first, first + count))
    assert int(found.num_cut()) == len(merged)
    assert merged == {seq: sorted(places) for seq, places in stored.items()}


@pytest.mark.once
@pytest.mark.parametrize(
    ("num_seqs", "shares", "max_pages"),
    [
        (3, 2, 256),
        (100, 50, 200),
        (128, 64, 200),
        (200, 200, 200),
        (512, 520, 200),
        (129, 64, 256),
        (512, 90, 256),
    ],
)
def test_long_first_splits_begin_before_short_ones(num_seqs, shares, max_pages):
    """All of them, in four classes by a fair share of the work, and in a class by number: of more than run at once in
    long tables alone."""
    lengths = np.asarray([(37 * i**3) % 3203 for i in range(num_seqs)], np.int32).clip(0, PAGE * max_pages)
    config = dict(num_splits=0, min_split_tokens=64, target_programs=2 * shares)
    problem = paged(num_seqs, max_pages=max_pages, **config)
    tiles = -(-lengths // TILE)
    share = -(-tiles.sum() // max(1, int(problem.shares)))
    first = [(one.seq, -(-tiles[one.seq] // one.count)) for one in dealt(problem, lengths) if one.index == 0]
    begun = [(sum(part * size < share for part in (1, 2, 4)), seq) for seq, size in first]
    assert begun == sorted(begun)
    assert sorted(seq for _, seq in begun) == list(range(num_seqs))
    assert num_seqs == 3 or len({number for number, _ in begun}) > 1


@pytest.mark.once
@pytest.mark.parametrize(
    ("num_seqs", "shares", "max_pages", "window"),
    [(513, 600, 256, None), (700, 128, 256, 1000)],
)
def test_first_splits_of_very_many_begin_by_number(num_seqs, shares, max_pages, window):
    """More than are ever put in order."""
    lengths = np.asarray([(37 * i**3) % 3203 for i in range(num_seqs)], np.int32)
    rules = Rules(sliding_window=window)
    problem = paged(num_seqs, num_splits=0, max_pages=max_pages, rules=rules, target_programs=2 * shares)
    assert [one.seq for one in dealt(problem, lengths) if one.index == 0] == list(range(num_seqs))


def test_room_for_partial_results_does_not_grow_with_the_table():
    """It follows from the programs aimed at: however long the longest sequence may be."""
    rooms = {paged(64, num_splits=0, max_pages=pages).num_places for pages in (2**12, 2**16, 2**20)}
    assert rooms == {264 - 1 + 64}


def test_lengths_that_cannot_be_cut_need_no_merge():
    assert paged(64, num_splits=0, max_pages=16).num_places == 0
    assert paged(64, num_splits=0, max_pages=4096, rules=Rules(sliding_window=128)).num_places == 0
    assert paged(64, num_splits=1, max_pages=4096).num_places == 0


def test_a_foreign_schedule_stays_in_its_room():
    least, most = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    cut = splits.ScheduledSplits(6, jnp.asarray([7, least, most, least, 40, 3], jnp.int32))
    for seq in range(5):
        first, count = (int(x) for x in cut.of(jnp.int32(seq)))
        assert 0 <= first <= first + count <= 12
    assert [int(cut.place(jnp.int32(split))) for split in (least, 5, most)] == [0, 5, 11]


@pytest.mark.once
@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize(("num_seqs", "sigma"), [(5, 1.0), (16, 0.2), (16, 1.0), (50, 0.5), (50, 2.0)])
def test_uneven_latents_begin_at_once_where_there_is_room(num_seqs, sigma, num_heads):
    """In splits of 1.5 shares at most, and of fewer where these too begin at once: to the nearest share else."""
    random = np.random.default_rng(num_seqs)
    for _ in range(20):
        lengths = np.asarray(4096 * random.lognormal(0, sigma, num_seqs), np.int32).clip(0, 512 * 64)
        problem = latent(num_seqs, num_splits=0, num_heads=num_heads)
        count = np.asarray(splits.cuts(jnp.asarray(lengths), problem)) + 1
        tiles = np.float32(-(-lengths // 64))
        share = np.float32(tiles.sum() / problem.shares)
        begun = [np.ceil(tiles / np.float32(most * share)) for most in (1.0625, 1.125, 1.25, 1.5)]
        fitting = [some for some in begun if some.sum() <= problem.shares]
        expected = fitting[0] if fitting else np.maximum(np.floor(tiles / share + 0.5), 1)
        assert max(abs(count - expected)) <= 1
        assert np.mean(count != expected) <= 1 / 16  # at a boundary a quotient in float32 may be off
        assert np.max(tiles / count) / share <= 1.5 + 1e-3
        assert sum(count - 1) <= problem.most_cuts


@pytest.mark.once
@pytest.mark.parametrize("num_heads", [16, 128])
def test_long_latents_begin_before_short_ones_where_registers_allow(num_heads):
    lengths = np.asarray([(37 * i**3) % 3203 for i in range(100)], np.int32)
    problem = latent(100, num_splits=0, num_heads=num_heads)
    first = [one.seq for one in dealt(problem, lengths) if one.index == 0]
    assert (first == sorted(first)) == (num_heads > 16)


@pytest.mark.parametrize(
    ("num_seqs", "length"), [(1, 32768), (8, 32768), (12, 22 * 64), (50, 4096), (70, 4096), (128, 1024)]
)
def test_equal_latents_take_one_program_a_core_at_most(num_seqs, length):
    """And no longer than the best such cut: 22 tiles as 11 times 2 on 132 cores, not as 8 times 3."""
    count = made(latent(num_seqs), [length] * num_seqs)[0]
    most = max(1, 132 // num_seqs)
    assert 1 <= count <= most
    tiles = length // 64
    assert -(-tiles // count) == -(-tiles // most)


@pytest.mark.parametrize(
    ("num_cut", "num_rows", "dim", "most", "expected"),
    [
        (64, 32, 128, 4, merge.Tiling(1, 128, 4, 4, 1)),
        (1, 32, 128, 32, merge.Tiling(1, 128, 32, 32, 1)),
        (16, 8, 128, 32, merge.Tiling(1, 128, 32, 32, 1)),
        (64, 32, 128, 264, merge.Tiling(1, 128, 16, 64, 4)),
        (1, 32, 128, 33, merge.Tiling(1, 128, 64, 64, 4)),
        (1, 32, 128, 66, merge.Tiling(1, 64, 64, 128, 4)),
        (256, 32, 80, 4, merge.Tiling(4, 128, 4, 4, 1)),
        (4, 128, 512, 16, merge.Tiling(1, 128, 16, 16, 1)),
        (4, 128, 512, 132, merge.Tiling(1, 128, 32, 32, 1)),
        (1, 16, 512, 132, merge.Tiling(1, 64, 64, 128, 4)),
        (128, 16, 512, 132, merge.Tiling(2, 256, 16, 16, 4)),
        (128, 128, 512, 66, merge.Tiling(8, 512, 2, 2, 4)),
    ],
)
def test_what_a_program_merges_at_once(num_cut, num_rows, dim, most, expected):
    assert merge.tiling(num_cut, num_rows, dim, most) == expected


@pytest.mark.parametrize(("dim", "most", "expected"), [
    (128, 264, merge.Tiling(1, 128, 4, 32, 1)),
    (128, 4, merge.Tiling(1, 128, 4, 4, 1)),
    (128, 2, merge.Tiling(1, 128, 2, 2, 1)),
    (64, 264, merge.Tiling(1, 64, 4, 32, 1)),
    (256, 264, merge.Tiling(1, 256, 2, 16, 1)),
    (2048, 264, merge.Tiling(1, 2048, 1, 2, 1)),
])  # fmt: skip
def test_many_rows_have_a_warp_each_where_no_more_start_than_run_at_once(dim, most, expected):
    """Else they would wait for each other: 256 sequences of 8 rows took 48 us where 41 suffice."""
    assert merge.tiling(64, 16, dim, most, counted=True) == expected
    assert merge.tiling(64, 64, dim, most, counted=True) == expected
    # All of them at once.
    assert merge.tiling(64, 8, dim, most, counted=True) == merge.tiling(64, 8, dim, most)
