"""Decoded sequences of `ragged_paged_attention` are dealt by work, however lengths are distributed."""

import dataclasses
from typing import Any

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references.ragged_attention_torch import ragged_paged_attention as reference
from support import ON_GPU

import pallas_attn
from pallas_attn import RaggedAttentionConfig, RaggedTiles
from pallas_attn._call.device import Device
from pallas_attn._call.pools import PoolShape
from pallas_attn._split.splits import FairSplits
from pallas_attn._tile.masking import Rules
from pallas_attn.ops.ragged_attention import splits
from pallas_attn.ops.ragged_attention.blocks import CUTS, TOTAL, Lens
from pallas_attn.ops.ragged_attention.config import heuristic
from pallas_attn.ops.ragged_attention.operands import Operands
from pallas_attn.ops.ragged_attention.problem import Problem
from pallas_attn.testing import cases, compare

H100 = Device("gpu", "NVIDIA H100 80GB HBM3", 132, 90)
MIB = 1 << 20


def short(num_seqs: int, columns: int) -> Problem:
    """The launch for decoded sequences of 32 over 8 heads of 128, as an H100 takes it."""
    sizes = dict(num_tokens=num_seqs, num_seqs=num_seqs, value_dim=128)
    config = heuristic(
        **sizes,
        num_kv_heads=8,
        group=4,
        head_dim=128,
        itemsize=2,
        query_itemsize=2,
        max_len=16 * columns,
        latent=False,
        device=H100,
    )
    assert config.short is not None
    return Problem(
        **sizes,
        num_heads=32,
        max_pages=columns,
        pool=PoolShape(9000, 16, 8, 128),
        scale=1.0,
        layout="NHD",
        rules=Rules(None, None, None),
        causal=True,
        max_tree=0,
        new_apart=False,
        skip_decode=False,
        launches=(config.long, config.short),
        launch=1,
    )


@pytest.mark.parametrize("giants", [1, 3])
@pytest.mark.parametrize("num_seqs", [16, 30, 64])
def test_no_split_has_more_than_two_fair_shares(num_seqs, giants):
    problem = short(num_seqs, 65536)
    lengths = np.r_[np.full(giants, 1 << 20), 300 + 7 * np.arange(num_seqs - giants)]
    tiles = -(-lengths // problem.config.block_kv)
    fair = FairSplits(problem.decoded, jnp.asarray(tiles, jnp.int32))
    seqs, _, count, _ = map(np.asarray, jax.vmap(fair.at)(jnp.arange(int(fair.num()))))
    assert sorted(set(seqs)) == list(range(num_seqs))
    longest = max(-(-tiles[seq] // n) for seq, n in zip(seqs, count, strict=True))
    # Two shares where all begin at once; else numbers of shares are to the nearest.
    most = 2 if fair.num() <= problem.decoded.shares else 1.5
    assert longest <= np.ceil(most * tiles.sum() / problem.decoded.shares)


@pytest.mark.parametrize("num_seqs", [8, 64, 4096])
def test_room_for_partial_results_is_for_shares(num_seqs):
    problem = short(num_seqs, 65536)
    assert problem.num_places, "a long sequence among them could not be cut"
    assert problem.num_places * 8 * problem.rows * 128 * 4 < 64 * MIB
    wider = short(num_seqs, 2 * 65536)
    assert wider.num_places == problem.num_places


def test_sequences_that_are_decoded_take_neither_room_nor_programs_in_the_launch_for_prompts():
    """536 MiB of it, and 8576 programs, where each had a block's."""
    long = short(64, 65536).launched(0)
    assert long.config.num_splits > 1
    assert long.num_places * 8 * long.rows * 128 * 4 < 128 * MIB
    assert long.most_blocks <= 16
    assert np.prod(long.grid) <= 4 * 132


def lens_refs(q_lens, *, num_seqs: int) -> Operands:
    """What a kernel is told of sequences of 60,000 tokens, and nothing else."""
    refs: dict[str, Any] = dict.fromkeys(("query", "key_cache", "block_tables"))
    lens = dict(num_seqs=[num_seqs], cu_q_lens=np.cumsum([0, *q_lens]), seq_lens=np.full(len(q_lens), 60_000))
    refs |= {name: jnp.asarray(value, jnp.int32) for name, value in lens.items()}
    return Operands(**refs, layout="NHD", scale=1.0, rules=Rules(), out_dtype=None)


def blocks_of(problem: Problem, q_lens, *, num_seqs: int) -> list[tuple[int, int] | None]:
    """(sequence, first row) of the block at each place of the launch for prompts, None where there is none."""
    lens = Lens(problem.ragged, lens_refs(q_lens, num_seqs=num_seqs))
    block, found = jax.vmap(lambda place: problem.find(lens, place))(jnp.arange(problem.num_cut))
    every = zip(np.asarray(block.seq), np.asarray(block.first_row), np.asarray(found), strict=True)
    return [(int(seq), int(row)) if mine else None for seq, row, mine in every]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("skip_decode", [False, True])
def test_each_block_has_one_place_and_late_rows_come_first(seed, skip_decode, refs_are_arrays):
    random = np.random.default_rng(seed)
    q_lens = random.choice([0, 1, 2, 4, 5, 17, 32, 33, 300], 40)
    num_seqs = int(random.integers(20, 41))
    padding = int(random.integers(0, 90))
    problem = dataclasses.replace(
        short(40, 512), num_tokens=int(q_lens.sum()) + padding, launch=0, skip_decode=skip_decode
    )
    rows, least = problem.rows, problem.launches[1].block_q // problem.group + 1
    # What is behind the last sequence is padding.
    tail = int(q_lens[num_seqs:].sum()) + padding
    served = [(seq, q_len) for seq, q_len in enumerate(q_lens[:num_seqs]) if q_len >= least]
    expected = [
        (seq, first)
        for seq, q_len in [*served, (num_seqs, tail)]
        for first in range(0, int(q_len) * problem.group, rows)
    ]
    found = blocks_of(problem, q_lens, num_seqs=num_seqs)
    assert found[: len(expected)] == expected[::-1]
    assert not any(found[len(expected) :])


def noted(problem: Problem, q_lens) -> Operands:
    """The lengths of a batch and, beside them, how many blocks a short launch counts for the next one."""
    refs = lens_refs(q_lens, num_seqs=len(q_lens))
    count = problem.launched(0).count_blocks(Lens(problem.ragged, refs))
    return dataclasses.replace(refs, num_blocks=jnp.reshape(count, 1))


@pytest.mark.parametrize("q_lens", [(), (1,), (40,), (0, 5, 300, 4, 1, 17)], ids=str)
@pytest.mark.parametrize("num_seqs", [40, 1500])
def test_the_short_launch_counts_the_blocks_of_the_next(num_seqs, q_lens, refs_are_arrays):
    q_lens = (*q_lens, *(1 for _ in range(num_seqs - len(q_lens))))
    problem = dataclasses.replace(short(num_seqs, 512), num_tokens=sum(q_lens))
    assert problem.notes == {TOTAL: 1}
    blocks = blocks_of(problem.launched(0), q_lens, num_seqs=num_seqs)
    assert noted(problem, q_lens).num_blocks == sum(block is not None for block in blocks)


def shares_of(problem: Problem, refs, monkeypatch) -> list[tuple[splits.Share, tuple[int, ...]]]:
    """What each program of the launch for prompts serves of KV head 3, and the splits of 100 tiles."""
    shares = []
    monkeypatch.setattr("pallas_attn._tile.triton.when", lambda where: lambda body: body() if where else None)
    for slot in range(problem.grid[0]):
        monkeypatch.setattr(
            "pallas_attn._tile.triton.program_id", lambda axis, slot=slot: jnp.int32((slot, 3)[axis])
        )
        served = []
        splits.BlockSplits(problem, refs).serve(served.append)
        shares += [(share, tuple(int(x) for x in share.tiles(jnp.int32(100)))) for share in served]
    return shares


@pytest.mark.parametrize("long", [0, 1, 3, 12])
@pytest.mark.sweep(long=lambda long: [long > 0])
def test_few_blocks_share_the_work_items_of_many(long, refs_are_arrays, monkeypatch):
    """64 sequences, of which none, one or more have five query tokens: the fewer, the more splits each may have."""
    q_lens = [5] * long + [1] * (64 - long)
    problem = dataclasses.replace(short(64, 65536), num_tokens=sum(q_lens)).launched(0)
    assert problem.is_counted
    shares = shares_of(problem, noted(problem.launched(1), q_lens), monkeypatch)
    most = min(problem.num_items // max(long, 1), problem.config.num_splits)
    assert {int(share.kv_head) for share, _ in shares} <= {3}
    found = sorted((int(share.block), begin, int(share.place)) for share, (begin, *_) in shares)
    assert len(found) == long * most
    assert len({place for *_, place in found}) == len(found)
    assert all(0 <= place < problem.num_places for *_, place in found)
    for block in range(long):
        mine = sorted((*tiles, int(share.place)) for share, tiles in shares if share.block == block)
        begins, ends, counts, places = zip(*(split for split in mine if split[0] < split[1]), strict=True)
        assert begins == (0, *ends[:-1])
        assert ends[-1] == 100
        assert set(counts) == {len(begins)}
        assert places == tuple(range(block * most, block * most + len(begins)))
    assert long != 1 or most > 8


def test_bounds_that_descend_have_the_paddings_blocks_alone(refs_are_arrays, monkeypatch):
    """Claims of all tokens by 32 sequences would be more blocks than there is room for."""
    problem = dataclasses.replace(short(64, 65536), num_tokens=70).launched(0)
    q_lens = [70, -70] * 32
    lens = Lens(problem.ragged, lens_refs(q_lens, num_seqs=64))
    assert int(lens.num_seqs) == 0
    of_padding = -(-70 * problem.group // problem.rows)
    assert lens.count(problem.num_blocks) == of_padding
    refs = noted(problem.launched(1), q_lens)
    blocks = {int(share.block) for share, _ in shares_of(problem, refs, monkeypatch)}
    assert blocks == set(range(of_padding))
    assert problem.notes == {CUTS: problem.most_blocks}


def test_prompts_wait_for_no_count():
    problem = dataclasses.replace(short(8, 512), num_tokens=8 * 512)
    assert not problem.notes
    assert not problem.launched(0).is_counted


def test_bounds_that_descend_lead_to_no_place_that_there_is_not(refs_are_arrays):
    problem = dataclasses.replace(short(6, 512), num_tokens=300, launch=0)
    for block in blocks_of(problem, [200, -150, 200, -(10**6), 2**30, 7], num_seqs=6):
        assert block is None or (0 <= block[0] <= 6 and 0 <= block[1] < 300 * problem.group)


def test_short_tables_are_left_whole_where_they_fill_the_device():
    assert not short(256, 64).num_places


@pytest.mark.parametrize("implementation", ["interpret", *ON_GPU])
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("q_lens", [(1, 1, 1, 2, 1, 20, 1), (1, 40, 1, 30, 17, 1, 90)])
@pytest.mark.sweep(window=None)
def test_a_giant_beside_short_ones_and_prompts(implementation, q_lens, window):
    lens = (1500, 300, 33, 700, 17, 64, 90)
    tiles = dict(block_kv=16, min_split_tokens=16, target_programs=24)
    config = RaggedAttentionConfig(
        RaggedTiles(block_q=32, num_splits=3, **tiles), RaggedTiles(block_q=16, num_splits=0, **tiles)
    )
    case = cases.RaggedCase(lens, 4, 2, 64, 16, q_lens=q_lens, sliding_window=window)
    data = inputs.make_ragged(case)
    out, lse = pallas_attn.ragged_paged_attention(
        *data.arguments(),
        **data.extras,
        sliding_window=window,
        return_lse=True,
        config=config,
        implementation=implementation,
    )
    expected, expected_lse = reference(case, data)
    compare.assert_rows_close(out, expected, dtype=case.dtype, case_id=case.id)
    compare.assert_lse_close(lse, expected_lse, dtype=case.dtype, case_id=case.id)


@pytest.mark.parametrize(
    ("num_seqs", "columns", "block_kv"), [(64, 64, 32), (64, 65, 128), (384, 512, 128), (512, 512, 32)]
)
def test_short_tables_and_many_sequences_have_small_tiles(num_seqs, columns, block_kv):
    assert short(num_seqs, columns).config.block_kv == block_kv
