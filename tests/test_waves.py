"""The heuristic of paged decode: a list of candidates and one cost. What it chooses fits, fills the device and is the
cheapest; how many programs share a multiprocessor is what compilers make of it."""

import dataclasses
import itertools
import math
import sys
from pathlib import Path
from typing import Any

import heuristic_constants
import jax
import jax.numpy as jnp
import lowering
import numpy as np
import pytest

import pallas_attn
from pallas_attn._call import budget
from pallas_attn._call.architecture import PROGRAM_BYTES, REGISTERS
from pallas_attn._call.device import Device
from pallas_attn._call.pools import PoolShape
from pallas_attn._split import splits, waves
from pallas_attn._tile.masking import Rules
from pallas_attn.ops.paged_attention import config as configs
from pallas_attn.ops.paged_attention.problem import Problem

pytestmark = pytest.mark.once  # arithmetic

H200, H100 = (Device("gpu", f"NVIDIA {kind}", 132, 90) for kind in ("H200", "H100 80GB HBM3"))
A100, B200 = Device("gpu", "NVIDIA A100-SXM4-80GB", 108, 80), Device("gpu", "NVIDIA B200", 148, 100)
RTX = Device("gpu", "NVIDIA RTX PRO 6000 Blackwell", 188, 120)
DEVICES = [H200, H100, A100, B200, RTX]
PAGE, MOST_SEQS = 16, 512


def shape(rows=4, head_dim=128, device=H200, itemsize=2, **more: Any) -> configs.Shape:
    return configs.Shape(
        rows=rows, head_dim=head_dim, itemsize=itemsize, query_itemsize=2, device=device, **more
    )


def chosen(num_seqs: int, max_len: int, kv_heads=8, measured: dict[str, int] | None = None, **of_shape: Any):
    batch = dict(num_seqs=num_seqs, num_kv_heads=kv_heads, max_len=max_len)
    return configs.heuristic(shape(**of_shape), **batch, measured=frozenset((measured or {}).items()))


def tile_of(config, **of_shape: Any) -> budget.Tile:
    candidate = configs.Candidate(config.block_kv, config.num_warps, config.num_stages)
    return shape(**of_shape).tile(config.block_q, candidate)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.kind)
@pytest.mark.parametrize(("head_dim", "itemsize"), [(16, 2), (64, 2), (128, 1), (128, 2), (256, 2), (512, 2)])
def test_what_is_chosen_fits(head_dim, itemsize, device):
    for num_seqs, max_len, rows in itertools.product((1, 40, 300), (256, 4096), (1, 24, 128)):
        of_shape: dict[str, Any] = dict(rows=rows, head_dim=head_dim, itemsize=itemsize, device=device)
        config = chosen(num_seqs, max_len, **of_shape)
        tile = tile_of(config, **of_shape)
        assert tile.fits(device)
        assert head_dim > 256 or not tile.spills


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_tokens_are_put_in_order_without_spills(head_dim, invariant):
    """With as many tokens as threads Triton 3.9 keeps 440 bytes of a thread on the stack for sm_90, 3456 for sm_80."""
    for device, max_len in itertools.product(DEVICES, (1024, 32768)):
        of_shape: dict[str, Any] = dict(head_dim=head_dim, layout="PACKED", device=device)
        config = configs.invariant(shape(**of_shape)) if invariant else chosen(1, max_len, **of_shape)
        assert config.block_kv < 32 * config.num_warps


@pytest.mark.parametrize("device", [H200, H100], ids=lambda device: device.kind)
@pytest.mark.parametrize("kv_heads", [1, 8])
def test_what_is_chosen_fills_the_device(kv_heads, device):
    """Where there is enough to do, and the memory does not do with a part of it: of equal lengths no wave is left with
    much idle."""
    for num_seqs in (1, 14, 40, 79, 131, 192, 333):
        config = chosen(num_seqs, 8192, kv_heads, device=device)
        tile, programs = tile_of(config, device=device), max(config.target_programs, num_seqs * kv_heads)
        slots = tile.resident(device) * device.num_cores
        if num_seqs * kv_heads * 8192 < 8 * tile.tokens * slots:
            continue
        busy = programs / slots
        assert busy / math.ceil(busy) > 0.6, (num_seqs, config)


def waves_of(tile: budget.Tile, walks: int, tokens: int, device=H200) -> waves.Waves:
    return waves.Waves(tile, device, walks, tokens, result_bytes=2048)


def test_no_other_plan_is_cheaper():
    for num_seqs, max_len in itertools.product((1, 7, 64, 500), (300, 4096)):
        config, walks = chosen(num_seqs, max_len), 8 * num_seqs
        whole = config.num_splits == 1
        splits = 1 if whole else max(1, config.target_programs // walks)
        own = waves_of(tile_of(config), walks, max_len).cost(splits, whole=whole)
        for tile in shape().tiles({}):
            others = waves_of(tile, walks, max_len)
            assert own <= others.cost(1, whole=True)
            for other in (1, 2, 3, 5, 8, 13, 21):
                if other * tile.tokens <= max_len:
                    assert own <= others.cost(other), (num_seqs, max_len, other)


def test_numbers_of_splits_that_are_not_weighed_cost_more():
    for tile, walks, tokens in itertools.product(shape().tiles({}), (1, 17, 64, 1000), (100, 5000)):
        call, most = waves_of(tile, walks, tokens), max(1, tokens // tile.tokens)
        assert call.cheapest(most) == min((call.cost(splits), splits) for splits in range(1, most + 1))


@pytest.mark.parametrize("walks", [1, 100, 5000])
def test_tables_of_any_width_are_weighed_at_once(walks, monkeypatch):
    """Each number of splits of a table of 2**31 tokens took minutes of a first call."""
    weighed = []
    cost = waves.Waves.cost
    monkeypatch.setattr(
        waves.Waves, "cost", lambda self, splits: weighed.append(splits) or cost(self, splits)
    )
    tile, tokens = shape().tiles({})[0], 2**22
    _, splits = waves_of(tile, walks, tokens).cheapest(tokens // tile.tokens)
    assert splits > 1
    assert weighed == sorted(set(weighed))
    assert len(weighed) < 2 * math.isqrt(tokens // tile.tokens) + 2


@pytest.mark.parametrize("whole", [False, True])
def test_longer_walks_never_cost_less(whole):
    for tile, walks in itertools.product(shape().tiles({}), (1, 64, 1000)):
        costs = [waves_of(tile, walks, tokens).cost(1, whole=whole) for tokens in range(16, 9000, 80)]
        assert costs == sorted(costs)


def test_a_faster_memory_never_costs_more():
    for tile, walks, tokens in itertools.product(shape().tiles({}), (1, 100, 1000), (500, 9000)):
        fast, slow = (waves_of(tile, walks, tokens, device).cost(1) for device in (H200, H100))
        assert fast <= slow


@pytest.mark.parametrize("num_seqs", [1, 3, 12, 24, 40, 67, 96, 128])
@pytest.mark.parametrize("max_len", [1024, 8192])
def test_equal_lengths_make_the_programs_that_were_reckoned_with(num_seqs, max_len):
    config = chosen(num_seqs, max_len)
    walks, at_once = 8 * num_seqs, waves_of(tile_of(config), 8 * num_seqs, max_len).at_once
    splits = max(1, config.target_programs // walks)
    assert dealt(config, num_seqs, max_len) == walks * splits
    assert config.target_programs <= max(at_once, walks * splits)


def dealt(config, num_seqs: int, max_len: int) -> int:
    """Programs that a batch of equal lengths has, as the kernel deals it."""
    problem = Problem(
        num_seqs=num_seqs,
        q_len=1,
        num_heads=32,
        max_pages=max_len // PAGE,
        pool=PoolShape(1, PAGE, 8, 128),
        scale=1.0,
        config=config,
        layout="NHD",
        rules=Rules(),
    )
    # Padded, so that the arithmetic is compiled once for all.
    lengths = np.zeros(MOST_SEQS, np.int32)
    lengths[:num_seqs] = max_len
    cuts = int(splits.equal_cuts(jnp.int32(-(-max_len // config.block_kv)), problem, MOST_SEQS))
    return (num_seqs + (cuts * num_seqs if problem.most_cuts else 0)) * problem.programs_per_split


def test_short_sequences_that_fill_the_device_are_left_whole():
    assert chosen(500, 256).num_splits == 1
    assert chosen(64, 8192).num_splits == 0, "one that is long would keep the others waiting"
    assert chosen(2, 1024).num_splits == 0, "two would leave most of the device idle"


def test_what_is_measured_is_kept():
    """And the rest is planned for it."""
    tile = dict(block_kv=64, num_warps=8, num_stages=5)
    config = chosen(40, 8192, measured=tile)
    assert {name: getattr(config, name) for name in tile} == tile
    assert chosen(40, 8192, measured=dict(target_programs=77)).target_programs == 77
    assert chosen(40, 8192, measured=dict(min_split_tokens=512)).min_split_tokens == 512
    assert [chosen(500, 256, measured=dict(num_splits=n)).num_splits for n in (0, 1)] == [0, 1]


@pytest.mark.parametrize("max_len", [256, 8192])
def test_few_rows_over_bytes_take_transposed_products_on_hopper(max_len):
    config = chosen(64, max_len, rows=8, itemsize=1)
    assert config.block_q == configs.TRANSPOSED_ROWS
    others: list[dict[str, Any]] = [
        dict(itemsize=2),
        dict(itemsize=1, rows=9),
        dict(itemsize=1, head_dim=256),
        dict(itemsize=1, layout="PACKED"),
        dict(itemsize=1, device=A100),
    ]
    for other in others:
        assert chosen(64, max_len, **{"rows": 8, **other}).block_q == 16


@pytest.mark.parametrize("rows", [33, 48, 64])
def test_keys_are_read_once_where_more_warps_hold_all_rows(rows):
    """Two blocks of rows would be two programs, each of which reads all keys."""
    for num_seqs, max_len in itertools.product((1, 24, 200), (1024, 16384)):
        of_shape: dict[str, Any] = dict(rows=rows, head_dim=256)
        config = chosen(num_seqs, max_len, kv_heads=1, **of_shape)
        assert config.block_q >= rows
        assert tile_of(config, **of_shape).threads > tile_of(chosen(num_seqs, max_len, rows=rows)).threads
    assert chosen(24, 8192, kv_heads=1, measured=dict(num_warps=4), **of_shape).block_q < rows


def test_twice_the_warps_share_long_steps_of_wide_rows():
    """Where many programs would take short ones; few begin sooner with these."""
    of_shape: dict[str, Any] = dict(rows=32, head_dim=256, kv_heads=1)
    long, short = chosen(541, 1184, **of_shape), chosen(2, 730, **of_shape)
    assert (long.block_kv, long.num_warps) == (64, 8)
    assert (short.block_kv, short.num_warps) == (32, 4)
    assert chosen(541, 1184, **(of_shape | dict(measured=dict(num_warps=4)))).block_kv == 32


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("head_dim", [64, 128, 512])
def test_splits_of_an_invariant_call_are_whole_tiles(rows, head_dim):
    config = configs.invariant(shape(rows=rows, head_dim=head_dim, device=A100))
    assert config.split_tokens >= config.block_kv
    assert config.split_tokens % config.block_kv == 0


def test_few_constants_decide():
    """Each is a number of the hardware or of a measurement: `python tests/heuristic_constants.py` lists them."""
    found = heuristic_constants.constants()
    assert len(found) <= 20, found


def test_the_choice_reads_no_other_module():
    """But `_call/sizes.py`, which rounds up to the tensor core's tile."""
    files = set()

    def note(frame, event, _):
        files.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        for device, itemsize in itertools.product((H200, RTX), (1, 2)):
            fresh = dataclasses.replace(device, num_cores=77)
            chosen(7, 700, rows=5, device=fresh, itemsize=itemsize, head_dim=96)
            configs.invariant(shape(device=fresh))
    finally:
        sys.setprofile(None)
    root = heuristic_constants.ROOT
    ran = {str(Path(file).relative_to(root)) for file in files if Path(file).is_relative_to(root)}
    assert ran == {*heuristic_constants.MODULES, "_call/sizes.py", "_call/checks.py"}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("A, B = 3, 4\nC = A * 2", ["A", "B"]),
        ("T = (Row(80, 1.5), Row(90, 2.5))", ["T[0]", "T[1]"]),
        ("def f(x):\n    return 7 * x + 1", ["f"]),
        ("class K:\n    a: int = 5\n    def g(self):\n        return 0.5", ["K"]),
        ("D = {3: 4}", ["D"]),
    ],
)
@pytest.mark.control
def test_a_number_would_be_counted(source, found):
    assert [one.name for one in heuristic_constants.of_source("", source)] == found


def compiled(
    sm: int, head_dim: int, rows: int, candidate: configs.Candidate, dtype: Any
) -> lowering.Compiled:
    """The kernel of a call in a candidate's tile."""
    block_q = configs.TRANSPOSED_ROWS if candidate in configs.TRANSPOSED else max(16, rows)
    config = configs.PagedAttentionConfig(
        block_q, *candidate[:1], num_warps=candidate[1], num_stages=candidate[2]
    )
    struct = jax.ShapeDtypeStruct
    pool = struct((4096, PAGE, 2, head_dim), dtype)
    query, lens = struct((64, 2 * rows, head_dim), jnp.bfloat16), struct((64,), jnp.int32)

    def call(*arrays):
        return pallas_attn.paged_attention(*arrays, config=config, implementation="pallas")

    lowered = lowering.lower_for_gpu(
        call, query, pool, pool, struct((64, 512), jnp.int32), lens, device=lowering.DEVICES[sm]
    )
    return lowering.compile_kernels(lowered, sm)[0]


CALLS = [(128, 4, jnp.bfloat16), (64, 4, jnp.bfloat16), (256, 4, jnp.bfloat16), (128, 32, jnp.bfloat16)]
OCCUPANCY = [
    *((90, *call, candidate) for call in CALLS for candidate in configs.CANDIDATES),
    *((90, 128, 4, jnp.float8_e4m3fn, candidate) for candidate in configs.TRANSPOSED),
    *((sm, *CALLS[0], candidate) for sm in (80, 100, 120) for candidate in configs.CANDIDATES),
    *(
        (90, 256, 64, jnp.bfloat16, one._replace(num_warps=2 * one.num_warps))
        for one in configs.CANDIDATES[:2]
    ),
]


@pytest.mark.parametrize(("sm", "head_dim", "rows", "dtype", "candidate"), OCCUPANCY)
def test_programs_that_share_a_multiprocessor_are_those_of_compiled_kernels(
    sm, head_dim, rows, dtype, candidate
):
    """By Triton's own registers and shared memory: at most one more or less of several, and none that spills."""
    device = Device("gpu", lowering.DEVICES[sm][0], lowering.DEVICES[sm][1], sm)
    of_shape = shape(rows=rows, head_dim=head_dim, itemsize=jnp.dtype(dtype).itemsize, device=device)
    block_q = configs.TRANSPOSED_ROWS if candidate in configs.TRANSPOSED else max(16, rows)
    tile = of_shape.tile(block_q, candidate)
    if not tile.fits(device) or tile.spills:
        assert (tile.rows, tile.tokens) not in {(t.rows, t.tokens) for t in of_shape.tiles({})}
        return
    kernel = compiled(sm, head_dim, rows, candidate, dtype)
    assert not kernel.stack_bytes
    registers = math.ceil(kernel.registers / 8) * 8 * tile.threads
    by_shared = (device.architecture.shared_bytes + PROGRAM_BYTES) // (kernel.shared_bytes + PROGRAM_BYTES)
    found = min(REGISTERS // registers, by_shared)
    assert abs(tile.resident(device) - found) <= (found > 1), (kernel.registers, kernel.shared_bytes)


@pytest.mark.parametrize("capability", [None, 60, 91, 104, 125])
def test_a_gpu_that_is_not_known_has_a_choice_too(capability):
    device = dataclasses.replace(H200, kind="NVIDIA Something", compute_capability=capability)
    assert tile_of(chosen(16, 8192, device=device), device=device).fits(device)
