"""What walks and split rules make the GPU do, as numbers: tiles visited, pieces made. Right results do not show it."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import LocalStride, MLADecodeConfig, PagedAttentionConfig
from pallas_attn._call.device import Device
from pallas_attn._tile import merge, pieces, triton
from pallas_attn._tile.layout import PoolShape
from pallas_attn._tile.masking import Rules
from pallas_attn.ops.mla_decode.problem import QUERY_DIM
from pallas_attn.ops.mla_decode.problem import Problem as MLAProblem
from pallas_attn.ops.paged_attention.config import heuristic
from pallas_attn.ops.paged_attention.problem import Problem as PagedProblem

PAGE, TILE = 16, 32


@pytest.fixture(autouse=True)
def refs_are_arrays(monkeypatch):
    """So that a kernel's rules can be asked outside of a kernel."""

    def load(ref, mask=True, other=0):
        return jnp.where(mask, ref.get(mode="clip"), other)

    monkeypatch.setattr(triton, "load", load)


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


def latent(num_seqs: int, **config) -> MLAProblem:
    sizes = {"num_splits": 128, "min_split_tokens": 64, "target_programs": 132, **config}
    return MLAProblem(
        num_seqs=num_seqs,
        q_len=1,
        num_heads=16,
        max_pages=512,
        pool=PoolShape(1, 64, 1, QUERY_DIM),
        scale=1.0,
        config=MLADecodeConfig(16, 64, **sizes),
        causal=False,
        num_parts=None,
    )


def visited(problem: PagedProblem, seq_len: int, kv_head: int = 0) -> list[int]:
    """First tokens of the tiles of a walk."""
    walk = problem.walk(jnp.int32(seq_len), kv_head)
    return [int(walk.start(jnp.int32(tile))) for tile in range(int(walk.num_tiles))]


def made(problem, lengths) -> list[int]:
    """Pieces of each sequence; one for those that are final at once."""
    cut = pieces.EqualPieces(problem, jnp.asarray(lengths, jnp.int32))
    return [int(cut.of(jnp.int32(seq))[1]) for seq in range(len(lengths))]


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


def test_a_window_ends_a_block_sparse_walk():
    pattern, window = LocalStride(64, 1, 4), 300  # tokens 700 to 999: blocks 10 to 15
    starts = visited(paged(rules=Rules(window, None, pattern)), 1000)
    assert starts == [block * 64 + part for block in (11, 15, 15) for part in (0, TILE)]


def test_a_long_sequence_is_cut_and_short_ones_are_not():
    problem = paged(4, num_splits=16, min_split_tokens=64, target_programs=32, max_pages=512)
    # 2 programs a tile; 258 tiles for 32 programs: a share is 16.125, and 252 tiles are 15.6 of them.
    assert made(problem, [8064, 64, 64, 64]) == [16, 1, 1, 1]


@pytest.mark.parametrize("most", [1, 2, 5, 64])
def test_as_many_pieces_as_the_config_allows(most):
    problem = paged(num_splits=most, min_split_tokens=64, target_programs=1000)
    assert made(problem, [4096]) == [most]


def test_no_piece_is_shorter_than_the_config_says():
    problem = paged(num_splits=64, min_split_tokens=256, target_programs=1000)
    assert made(problem, [2048]) == [8]
    assert made(problem, [200]) == [1]


def test_shares_are_rounded_as_the_op_says():
    """2.75 shares: three pieces where programs share a multiprocessor, two where each fills one."""
    lengths = [11 * 64, 64, 64, 64, 64, 64]  # 16 tiles, 4 a program
    near = paged(6, heads=(1, 1), block_kv=64, num_splits=8, min_split_tokens=64, target_programs=4)
    assert made(near, lengths) == [3, 1, 1, 1, 1, 1]
    assert made(latent(6, num_splits=8, target_programs=4), lengths) == [2, 1, 1, 1, 1, 1]


def test_pieces_of_sequences_have_places_of_their_own():
    problem = paged(3, num_splits=4, min_split_tokens=64, target_programs=1000)
    cut = pieces.EqualPieces(problem, jnp.asarray([4096, 100, 1000], jnp.int32))
    assert [int(cut.of(jnp.int32(seq))[0]) for seq in range(3)] == [0, 4, 8]
    assert problem.num_pieces == 12


def test_a_foreign_schedule_stays_in_its_room():
    least, most = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    cut = pieces.ScheduledPieces(6, jnp.asarray([7, least, most, least, 40, 3], jnp.int32))
    for seq in range(5):
        first, count = (int(x) for x in cut.of(jnp.int32(seq)))
        assert 0 <= first <= first + count <= 12
    assert [int(cut.slot(jnp.int32(piece))) for piece in (least, 5, most)] == [0, 5, 11]


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
    ("num_seqs", "max_len", "expected"),
    # Two programs a multiprocessor where there are few, at most one piece for each 256 (short: 64) tokens.
    [(1, 32768, 66), (1, 1024, 16), (16, 32768, 5), (64, 32768, 4), (64, 1024, 1), (256, 8192, 4)],
)
def test_pieces_that_the_heuristic_provides_for(num_seqs, max_len, expected):
    config = heuristic(
        num_seqs=num_seqs,
        num_kv_heads=8,
        rows=4,
        head_dim=128,
        itemsize=2,
        query_itemsize=2,
        max_len=max_len,
        device=Device("gpu", "NVIDIA H100 80GB HBM3", 132, 90),
    )
    assert config.num_splits == expected


@pytest.mark.parametrize(
    ("num_seqs", "num_rows", "dim", "most", "expected"),
    [
        (64, 32, 128, 4, merge.Tiling(4, 128, 4, 4)),
        (1, 32, 128, 66, merge.Tiling(1, 128, 64, 8)),
        (256, 32, 80, 4, merge.Tiling(16, 128, 1, 4)),
        (1, 16, 512, 132, merge.Tiling(1, 128, 64, 4)),
        (128, 16, 512, 132, merge.Tiling(4, 512, 4, 4)),
        (128, 128, 512, 66, merge.Tiling(16, 512, 1, 4)),
    ],
)
def test_what_a_program_merges_at_once(num_seqs, num_rows, dim, most, expected):
    assert merge.tiling(num_seqs, num_rows, dim, most) == expected
