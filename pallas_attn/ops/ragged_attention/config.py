"""Tile sizes of the ragged attention kernel, and the heuristic for devices without a measured file."""

import dataclasses
import math

from pallas_attn._call.checks import fail
from pallas_attn._call.configs import SplitKVConfig
from pallas_attn._call.device import Device
from pallas_attn._tile import pieces, triton

RESERVED_KB = 12


@dataclasses.dataclass(frozen=True)
class RaggedTiles(SplitKVConfig):
    """How one launch of the kernel is cut up.

    block_q: query rows (tokens x heads) of one sequence and KV head that a program serves, a power of two >= 16.
    block_kv: tokens a program takes in per step, a power of two >= 16.
    num_splits: most pieces the keys of a block of rows are cut into. How many are used follows from the lengths at
        run time.
    min_split_tokens: a piece shorter than this costs more in merging than it gains in parallelism.
    target_programs: programs, over the whole device, that the run-time cut aims at.
    num_warps, num_stages: Triton's warps per program and depth of software pipelining.
    """


@dataclasses.dataclass(frozen=True)
class RaggedAttentionConfig:
    """How one call is cut up: two launches of one kernel, each over the sequences that its tiles are made for.

    long: for sequences with more query rows a KV head than short.block_q, and for all where there is no `short`.
    short: for sequences that are decoded, one program's rows or fewer; None leaves them to `long`.
    """

    long: RaggedTiles
    short: RaggedTiles | None = None

    def __post_init__(self):
        for name, optional in (("long", False), ("short", True)):
            tiles = getattr(self, name)
            if not (isinstance(tiles, RaggedTiles) or (optional and tiles is None)):
                expected = "RaggedTiles or None" if optional else "RaggedTiles"
                fail("RaggedAttentionConfig", name, expected, type(tiles).__name__, TypeError)


def heuristic(
    *,
    num_tokens: int,
    num_seqs: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    value_dim: int,
    itemsize: int,
    query_itemsize: int,
    max_len: int,
    device: Device,
) -> RaggedAttentionConfig:
    """`itemsize` bytes hold an element of the cache, `query_itemsize` one of the query; `max_len` tokens fit in a row
    of the block table."""
    width = triton.tile_side(max(head_dim, value_dim))
    # Float32 products are no tensor core's work, and take registers for both operands.
    rows, block_kv = (128, 64) if query_itemsize == 2 and device.shared_kib > 99 else (64, 32)
    while rows * width > 128 * 256:
        rows //= 2
    block_q = min(rows, triton.tile_side(num_tokens * group))
    while _needed_kb(block_q, block_kv, width, itemsize, query_itemsize) > device.shared_kib:
        block_kv //= 2
    warps = 8 if block_q >= 128 else 4
    blocks = (math.ceil(num_tokens * group / block_q)) * num_kv_heads
    long = RaggedTiles(
        block_q=block_q,
        block_kv=block_kv,
        num_splits=most_splits(blocks, max_len, device.num_cores, 512),
        min_split_tokens=512,
        target_programs=device.num_cores,
        num_warps=warps,
        num_stages=3,
    )
    short_q = triton.tile_side(group)
    if short_q >= block_q:
        return RaggedAttentionConfig(long)
    programs = num_seqs * num_kv_heads
    short_kv = 128 if width <= 128 and itemsize <= 2 else 64 if itemsize <= 2 and width <= 256 else 32
    short = RaggedTiles(
        block_q=short_q,
        block_kv=short_kv,
        num_splits=most_splits(programs, max_len, 4 * device.num_cores, 256),
        min_split_tokens=256,
        target_programs=4 * device.num_cores,
        num_warps=4,
        num_stages=3,
    )
    return RaggedAttentionConfig(long, short)


def _needed_kb(block_q: int, block_kv: int, width: int, itemsize: int, query_itemsize: int) -> float:
    """Shared memory of a program: the queries, two buffers for tiles of keys and values, and for a cache narrower than
    the queries a converted tile of each."""
    narrow = itemsize < query_itemsize
    token = 4 * itemsize + (2 * query_itemsize if narrow else 0)
    return (block_q * query_itemsize + block_kv * token) * width / 1024 + RESERVED_KB


def most_splits(programs: int, max_len: int, target_programs: int, min_split_tokens: int) -> int:
    """Pieces to provide for: lengths are not known when a call is compiled, only what the table can hold."""
    wanted = math.ceil(target_programs / programs) if 2 * programs < 3 * target_programs else 1
    return pieces.most_pieces(wanted, max_len, min_split_tokens)
