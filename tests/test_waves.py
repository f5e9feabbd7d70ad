"""The heuristic of paged decode: programs fill whole waves of those that run at once, and tiles the room there is."""

import itertools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn._call.device import Device
from pallas_attn._split import pieces
from pallas_attn._split.waves import Waves
from pallas_attn._tile.layout import PoolShape
from pallas_attn._tile.masking import Rules
from pallas_attn.ops.paged_attention import config as configs
from pallas_attn.ops.paged_attention.problem import Problem
from pallas_attn.ops.paged_attention.room import EASILY_DEALT, Room

pytestmark = pytest.mark.once  # arithmetic

HOPPER = Device("gpu", "a Hopper", 132, 90)
DEVICES = [HOPPER, Device("gpu", "an A100", 108, 80), Device("gpu", "a card", 170, 120)]
PAGE, MOST_SEQS = 16, 512


def chosen(
    num_seqs: int, max_len: int, kv_heads=8, group=4, head_dim=128, device=HOPPER, itemsize=2, **measured
):
    sizes: dict[str, Any] = dict(
        rows=group, head_dim=head_dim, itemsize=itemsize, query_itemsize=2, device=device
    )
    return configs.heuristic(num_seqs=num_seqs, num_kv_heads=kv_heads, max_len=max_len, **sizes, **measured)


def resident(config, num_seqs: int) -> int:
    sizes = (config.block_q, config.block_kv, config.num_warps, config.num_stages)
    easily = config.num_splits == 1 or num_seqs in EASILY_DEALT
    return Room(128, 2, 2, HOPPER).resident(*sizes, easily_dealt=easily)


def dealt(config, num_seqs: int, max_len: int, kv_heads=8, group=4) -> int:
    """Programs that a batch of equal lengths has, as the kernel deals it."""
    problem = Problem(
        num_seqs=num_seqs,
        q_len=1,
        num_heads=kv_heads * group,
        max_pages=max_len // PAGE,
        pool=PoolShape(1, PAGE, kv_heads, 128),
        scale=1.0,
        config=config,
        layout="NHD",
        rules=Rules(),
    )
    # Padded, so that the arithmetic is compiled once for all.
    lengths = np.pad(np.full(num_seqs, max_len, np.int32), (0, MOST_SEQS - num_seqs))
    cuts = int(jnp.sum(pieces.cuts(jnp.asarray(lengths), problem))) if problem.most_cuts else 0
    return (num_seqs + cuts) * problem.programs_per_piece


def idle(programs: int, together: int) -> float:
    """Time that equal programs take over that of the same work in full waves, less 1. A last wave of a part x takes
    all of a full one's time where a program has a multiprocessor, down to half where four share one."""
    slots = together * HOPPER.num_cores
    full, last = divmod(programs, slots)
    alone = min(max(1, together / 2), 2)
    return (full + (last > 0) / (alone - (alone - 1) * last / slots)) * slots / programs - 1


@pytest.mark.sweep
@pytest.mark.parametrize("kv_heads", [1, 4, 8, 32])
@pytest.mark.parametrize("max_len", [8192, 32768])
def test_no_batch_of_long_sequences_waits_for_the_rest_of_a_wave(kv_heads, max_len):
    """Where there is enough to do; and hardly more than with the best number of pieces."""
    tile: dict[str, Any] = dict(block_kv=32, num_warps=4, num_stages=5)
    for num_seqs in (*range(1, 140), 192, 256, 333):
        config, streams = chosen(num_seqs, max_len, kv_heads, **tile), num_seqs * kv_heads
        together = resident(config, num_seqs)
        if streams * max_len < 528 * config.min_split_tokens:
            continue
        lost = idle(max(config.target_programs, streams), together)
        numbers = range(1, max(1, min(max_len // config.min_split_tokens, 2112 // streams)) + 1)
        best = min(idle(streams * number, together) for number in numbers)
        assert lost < 0.17, (num_seqs, config)
        assert lost < best + 0.1, (num_seqs, config)  # finer pieces cost up to as much


@pytest.mark.parametrize("tile", [(64, 8, 5), (128, 4, 3)])
def test_programs_that_share_no_multiprocessor_fill_waves_too(tile):
    measured: dict[str, Any] = dict(zip(("block_kv", "num_warps", "num_stages"), tile, strict=True))
    losses = []
    for num_seqs in range(8, 140):
        config = chosen(num_seqs, 32768, **measured)
        losses.append(idle(max(config.target_programs, 8 * num_seqs), resident(config, num_seqs)))
    assert max(losses) < 0.25
    assert sum(losses) / len(losses) < 0.1


@pytest.mark.parametrize("num_seqs", [1, 3, 12, 24, 40, 67, 96, 128])
@pytest.mark.parametrize("max_len", [1024, 8192])
def test_equal_lengths_make_the_programs_that_were_reckoned_with(num_seqs, max_len):
    config = chosen(num_seqs, max_len)
    assert dealt(config, num_seqs, max_len) == max(config.target_programs, 8 * num_seqs)


def test_a_long_sequence_beside_many_is_cut_by_what_runs_at_once():
    """Not by how many programs there are. By twice as many where there are more than three waves of walks: 256, half
    of them 8192 tokens and the others a twentieth, take 1484 us on an H100, by as many as run at once 1524."""
    apart: dict[str, Any] = dict(block_kv=32, num_warps=4, num_stages=7)
    assert chosen(240, 20000, **apart).target_programs == 4 * HOPPER.num_cores
    for num_seqs in (248, 512):
        assert chosen(num_seqs, 20000, **apart).target_programs == 2 * 4 * HOPPER.num_cores
        assert chosen(num_seqs, 20000).target_programs == 2 * 5 * HOPPER.num_cores


@pytest.mark.parametrize(("num_seqs", "max_len"), [(3, 50000), (64, 4096), (64, 60000), (512, 20000)])
def test_what_is_dealt_has_programs_that_share_a_multiprocessor(num_seqs, max_len):
    """On an H100 one of 60,000 tokens among short ones takes 134 us in tiles of 32, 146 in tiles of 128."""
    assert chosen(num_seqs, max_len).block_kv == 32
    assert chosen(64, 8192, head_dim=64).block_kv == 128, "of other widths nothing was measured"


@pytest.mark.parametrize(
    ("num_seqs", "max_len", "stages"),
    [(64, 2048, 7), (16, 3072, 7), (40, 2048, 5), (300, 2048, 5), (4, 3000, 5)],
    ids=["at once", "and cut", "five", "waves", "short pieces"],
)
def test_programs_that_run_at_once_are_kept_apart(num_seqs, max_len, stages):
    """Four on a multiprocessor, where there would be room for five."""
    config = chosen(num_seqs, max_len)
    assert (config.block_kv, config.num_warps, config.num_stages, config.num_splits) == (32, 4, stages, 0)
    if stages == 7:
        assert resident(config, num_seqs) == 4
        assert 3 * HOPPER.num_cores < dealt(config, num_seqs, max_len) <= 4 * HOPPER.num_cores
    # Elsewhere no fifth would fit, or no fourth beside one more buffer.
    assert chosen(num_seqs, max_len, device=DEVICES[1]).num_stages == 5
    assert chosen(num_seqs, max_len, device=DEVICES[2]).num_stages == 5


def test_what_is_measured_is_kept():
    """And pieces fit the waves of a measured tile."""
    config = chosen(40, 8192, block_kv=64, num_warps=8, num_stages=5)
    assert (config.block_kv, config.num_warps, config.num_stages) == (64, 8, 5)
    assert config.target_programs != chosen(40, 8192, block_kv=32, num_warps=4, num_stages=5).target_programs
    assert chosen(40, 8192, target_programs=77).target_programs == 77
    whole = [chosen(n, 1024, target_programs=264).num_splits for n in (16, 17)]
    assert whole == [0, 1], "half the programs aimed at are enough for short sequences"


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.kind)
@pytest.mark.parametrize(("head_dim", "itemsize"), [(64, 2), (128, 1), (128, 2), (256, 2), (512, 2)])
def test_tiles_fit(head_dim, itemsize, device):
    for num_seqs, max_len, group in itertools.product((1, 16, 40, 300), (256, 1024, 8192), (1, 24, 128)):
        config = chosen(num_seqs, max_len, 8, group, head_dim, device, itemsize)
        room = Room(head_dim, itemsize, 2, device)
        assert room._fits(config.block_q, config.block_kv, config.num_warps, config.num_stages)


@pytest.mark.parametrize("max_len", [256, 8192])
def test_few_rows_over_bytes_are_turned_on_hopper(max_len):
    tile = chosen(64, max_len, group=8, itemsize=1)
    assert (tile.block_q, tile.block_kv, tile.num_warps, tile.num_stages) == (8, 64, 2, 3)
    others: list[dict[str, Any]] = [
        dict(itemsize=2),
        dict(itemsize=1, group=9),
        dict(itemsize=1, head_dim=32),
        dict(itemsize=1, head_dim=256),
        dict(itemsize=1, layout="PACKED"),
        dict(itemsize=1, device=DEVICES[1]),
    ]
    for other in others:
        assert chosen(64, max_len, **other).block_q == 16


# Of the kernel as XLA compiles it for an H200: (bytes of shared memory, registers of a thread). "whole": uncut;
# "turned": with eight rows.
COMPILED = {
    (128, 2, "whole"): {(32, 4, 5): (37920, 80)},
    (128, 2): {
        (32, 4, 5): (37920, 96),
        (32, 4, 7): (54328, 96),
        (64, 4, 3): (38944, 144),
        (64, 8, 5): (71744, 96),
        (128, 4, 3): (139264, 214),
        (128, 8, 5): (139392, 114),
    },
    (64, 2): {(128, 4, 3): (71680, 168), (128, 8, 5): (71808, 98)},
    (256, 2): {(64, 4, 3): (75808, 208), (64, 8, 5): (141376, 128)},
    (128, 1): {(64, 2, 3): (55296, 255)},
    (128, 1, "turned"): {(64, 2, 3): (51264, 186), (64, 4, 3): (51328, 103), (128, 4, 3): (100480, 150)},
}


@pytest.mark.parametrize(
    ("sizes", "tile"), [(sizes, tile) for sizes, tiles in COMPILED.items() for tile in tiles]
)
def test_programs_that_share_a_multiprocessor_are_those_of_compiled_kernels(sizes, tile):
    (head_dim, itemsize, *how), (shared, registers) = sizes, COMPILED[sizes][tile]
    in_registers = 65536 // (math.ceil(registers / 8) * 8 * 32 * tile[1])
    expected = min(in_registers, 228 * 1024 // (shared + 1024))
    room = Room(head_dim, itemsize, 2, HOPPER)
    assert room.resident(8 if "turned" in how else 16, *tile, easily_dealt="whole" in how) == expected


@pytest.mark.parametrize(("together", "lost"), [(1, 1.0), (2, 1.0), (4, 0.5)])
def test_what_one_program_too_many_costs(together, lost):
    """Of a wave: a program that fills a multiprocessor is no quicker for being the last."""
    waves = Waves(1, 8192, 0.5, 2.0, resident=together, num_cores=132)
    assert waves.taken(waves.slots) == 1
    assert waves.taken(waves.slots + 1) == pytest.approx(1 + lost, rel=1e-2)
    times = [waves.taken(programs) for programs in range(1, 3 * waves.slots)]
    assert times == sorted(times), "never quicker for being more"


def test_short_sequences_that_fill_the_device_are_left_whole():
    assert chosen(16, 512).num_splits == 1
    for tokens in (1024, 2048):
        assert chosen(16, tokens).num_splits == 0, "one that is long might keep the others waiting"
    assert chosen(2, 1024).num_splits == 0, "two would leave most of the device idle"


@pytest.mark.parametrize("num_seqs", [24, 33, 40, 64, 128])
@pytest.mark.parametrize(
    ("tile", "least"), [((32, 4, 5), configs.EVENING), ((128, 4, 3), configs.EVENING_ALONE)]
)
def test_lengths_that_differ_have_programs_to_even_them_out(num_seqs, tile, least):
    """However well one wave would do for equal ones; fewer of those that share a multiprocessor with no other."""
    sizes = dict(zip(("block_kv", "num_warps", "num_stages"), tile, strict=True))
    for kv_heads in (4, 8):
        config = chosen(num_seqs, 8192, kv_heads, **sizes)
        assert config.target_programs >= least * HOPPER.num_cores


@pytest.mark.parametrize(("num_seqs", "kv_heads"), [(16, 8), (64, 4), (256, 1), (64, 1)])
def test_programs_alone_on_a_multiprocessor_are_no_more_than_two_waves(num_seqs, kv_heads):
    """On an H100 16 x 8192 takes 186 us in 256 large programs, 192 in 512."""
    config = chosen(num_seqs, 8192, kv_heads, block_kv=128, num_warps=4, num_stages=3)
    assert max(config.target_programs, num_seqs * kv_heads) == 256


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("head_dim", [64, 128, 512])
def test_pieces_of_an_invariant_call_are_whole_tiles(rows, head_dim):
    """Whatever the batch, of which it is told nothing."""
    config = configs.invariant(rows=rows, head_dim=head_dim, itemsize=2, query_itemsize=2, device=DEVICES[1])
    assert config.split_tokens >= config.block_kv
    assert config.split_tokens % config.block_kv == 0


@pytest.mark.parametrize(("num_seqs", "max_len"), [(1, 4096), (1, 8192), (2, 8192), (1, 16384)])
def test_few_walks_are_cut_finely(num_seqs, max_len):
    """One KV head of 8192 tokens in pieces of 64 takes 7.3 us on an H200, of 256 11.4."""
    config = chosen(num_seqs, max_len, kv_heads=1, group=8)
    assert config.min_split_tokens == 64
    assert config.target_programs == num_seqs * max_len // 64
    assert chosen(num_seqs, 32768, kv_heads=1, group=8).min_split_tokens == 256


@pytest.mark.parametrize(
    ("num_seqs", "target_programs", "together"),
    [(16, 528, 4), (64, 660, 5), (1, 128, 4), (64, 528, 4), (65, 512, 0)],
)
def test_no_more_programs_share_a_multiprocessor_than_are_planned(
    num_seqs, target_programs, together, monkeypatch
):
    monkeypatch.setattr("pallas_attn.ops.paged_attention.problem.current_device", lambda: HOPPER)
    config = configs.PagedAttentionConfig(16, 32, target_programs=target_programs)
    sizes: dict[str, Any] = dict(num_heads=32, max_pages=512, scale=1.0, layout="NHD", rules=Rules(), q_len=1)
    pool = PoolShape(num_seqs * 512, PAGE, 8, 128)
    problem = Problem(num_seqs=num_seqs, pool=pool, config=config, **sizes)
    assert problem.most_together == together


@pytest.mark.parametrize(
    ("walks", "tile"),
    [
        (528, configs.APART_TILE),
        (640, configs.SMALL_TILE),  # one wave of five
        (704, configs.MIDDLE_TILE),
        (800, configs.MIDDLE_TILE),
        (1024, configs.APART_TILE),  # two waves of four
        (1280, configs.SMALL_TILE),  # two of five
        (1536, configs.MIDDLE_TILE),
        (2048, configs.SMALL_TILE),  # more than three
    ],
)
def test_walks_of_some_waves_have_tiles_that_fill_the_last(walks, tile):
    """128 x 4096 takes 709 us on an H100 by this, 767 in waves of five."""
    config = chosen(walks // 8, 4096)
    assert (config.block_kv, config.num_warps, config.num_stages) == tile
    if tile == configs.MIDDLE_TILE:
        assert config.target_programs == 528, "shares of what runs at once, for lengths that differ"
    few_tokens = chosen(walks // 8, 512)
    assert (few_tokens.block_kv, few_tokens.num_warps, few_tokens.num_stages) == configs.SMALL_TILE


@pytest.mark.parametrize(
    ("num_seqs", "tile", "target"),
    [
        (16, configs.APART_TILE, 4 * 128),
        (17, configs.MIDDLE_TILE, 190),  # hardly more walks than multiprocessors
        (19, configs.MIDDLE_TILE, 212),
        (20, configs.APART_TILE, 3 * 160),
        (22, configs.APART_TILE, 3 * 176),  # all of a wave
        (24, configs.MIDDLE_TILE, 2 * 192),
        (26, configs.SMALL_TILE, 3 * 208),
        (40, configs.SMALL_TILE, 2 * 320),
        (42, configs.MIDDLE_TILE, 336),  # twice as many would be more than a wave of five
        (49, configs.MIDDLE_TILE, 392),
        (50, configs.APART_TILE, 400),
    ],
)
def test_walks_of_less_than_a_wave_have_tiles_that_fill_it(num_seqs, tile, target):
    """44 x 2048 take 128 us on an H100 by this, 137 in three pieces each."""
    config = chosen(num_seqs, 8192)
    assert (config.block_kv, config.num_warps, config.num_stages) == tile
    assert config.target_programs == target
    assert dealt(config, num_seqs, 8192) % (8 * num_seqs) == 0, "equal lengths have equal pieces"
    assert dealt(config, num_seqs, 8192) <= resident(config, num_seqs) * HOPPER.num_cores


@pytest.mark.parametrize(
    ("num_seqs", "max_len", "whole"),
    [
        *((num_seqs, 1024, 0) for num_seqs in (8, 9, 16, 17, 32, 49, 64, 66)),
        (67, 1024, 1),  # more walks than run at once
        (16, 512, 1),
        (32, 512, 1),
    ],
)
def test_short_sequences_are_whole_where_the_longest_keeps_nobody_waiting(num_seqs, max_len, whole):
    """32 exponential lengths of up to 1024 tokens take 14 us on an H100 where they are dealt, 24 where not."""
    kinds: list[dict[str, Any]] = [{}]
    if not whole:  # what may be is where it costs less
        kinds += [dict(itemsize=1), dict(head_dim=64), dict(head_dim=256)]
    for kind in kinds:
        config = chosen(num_seqs, max_len, **kind)
        assert config.num_splits == whole
        if num_seqs > 8:
            assert config.target_programs == 8 * num_seqs, "equal lengths in one piece each"


@pytest.mark.parametrize(("walks", "tile"), [(704, configs.MIDDLE_TILE), (1280, configs.SMALL_TILE)])
def test_short_tables_of_some_waves_are_whole_in_these_tiles(walks, tile):
    config = chosen(walks // 8, 1024)
    assert config.num_splits == 1
    assert (config.block_kv, config.num_warps, config.num_stages) == tile


def test_a_measured_tile_is_cut_as_its_waves_ask_for():
    """704 walks in one piece each would be a wave and a twentieth of five programs a multiprocessor."""
    config = chosen(88, 4096, block_kv=32, num_warps=4, num_stages=5)
    assert config.target_programs >= 2 * 704
