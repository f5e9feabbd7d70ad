"""Tile sizes of the paged attention kernel, and the heuristic for devices without a measured file."""

import dataclasses
import math
from typing import Any

from pallas_attn._call.configs import SplitKVConfig
from pallas_attn._call.device import Device
from pallas_attn._tile import triton

# What tiles of keys and values may take of a program's shared memory, where there is much and where there is little,
# and what is left for layouts and reductions.
TILES_KB, SMALL_TILES_KB = 128, 64
RESERVED_KB = 12
# Query rows times their width, which their sums take in registers too: more spills.
ROWS_BYTES = 64 * 256 * 2
# Pieces of a batch-invariant call: 128 programs for one sequence of 8192 tokens with 8 KV heads. Beyond 32768 tokens
# pieces grow instead, or a wide table would ask for room without end.
INVARIANT_TOKENS, INVARIANT_SPLITS = 512, 64


@dataclasses.dataclass(frozen=True)
class PagedAttentionConfig(SplitKVConfig):
    """How one call of the kernel is cut up.

    block_q: query rows (tokens x heads) of one KV head that a program serves, a power of two >= 16, the tensor
        core's tile.
    block_kv: tokens a program takes in per step, a power of two >= 16.
    num_splits: most pieces a sequence's tokens are cut into: 1 cuts none, 0 as many as the lengths ask for at run time.
    min_split_tokens: a split shorter than this costs more in merging than it gains in parallelism.
    target_programs: programs, over the whole device, that the run-time split aims at.
    split_tokens: above 0, pieces have this many tokens, or more in sequences that would else have more than
        `num_splits`, instead of a share of the batch's work: what is cut where depends on the sequence alone.
    num_warps, num_stages: Triton's warps per program and depth of software pipelining.
    """


def heuristic(
    *,
    num_seqs: int,
    num_kv_heads: int,
    rows: int,
    head_dim: int,
    itemsize: int,
    query_itemsize: int,
    max_len: int,
    device: Device,
    **measured: int,
) -> PagedAttentionConfig:
    """`rows` query rows (tokens x heads of a group) share a KV head; `itemsize` bytes hold an element of the cache,
    `query_itemsize` one of the query; `max_len` tokens fit in a row of the block table. `measured` are fields of the
    config that are known better.

    From sweeps on an H100 (README.md, benchmarks/results): few programs and short sequences want small tiles, many
    programs with much to read tiles of 128 tokens. Few want splits enough for two programs a multiprocessor, many
    only to even out lengths.
    """
    width = triton.tile_side(head_dim)

    def fits(block_q: int, block_kv: int, num_stages: int) -> bool:
        needed = _needed_kb(block_q, block_kv, num_stages, width, itemsize, query_itemsize, device)
        return needed <= device.shared_kib

    block_q = min(64, triton.tile_side(rows))
    # As many query rows as there is room for: in registers for their sums, and in shared memory beside the smallest
    # tiles of keys and values.
    while block_q > 16 and (block_q * width * query_itemsize > ROWS_BYTES or not fits(block_q, 16, 5)):
        block_q //= 2
    block_q = measured.get("block_q", block_q)
    programs = num_seqs * num_kv_heads * math.ceil(rows / block_q)
    cores = device.num_cores
    short = max_len < 4096
    block_kv, num_stages = (32, 5) if short or 2 * programs < cores else (128, 3)
    tiles_kb = TILES_KB if device.shared_kib > 99 else SMALL_TILES_KB
    while block_kv > 16 and (
        4 * block_kv * width * itemsize > tiles_kb * 1024 or not fits(block_q, block_kv, num_stages)
    ):
        block_kv //= 2
    chosen = {
        "block_q": block_q,
        "block_kv": block_kv,
        "min_split_tokens": 64 if short else 256,
        "target_programs": 2 * cores if programs <= 2 * cores else 4 * cores,
        "num_warps": 4,
        "num_stages": num_stages,
        **measured,
    }
    # Neither long sequences nor multiprocessors without work: no second kernel for the merge. Where a table holds more
    # than this, sequences that differ are the rule, and the longest alone would keep the call waiting.
    whole = max_len <= 1024 and 2 * programs >= chosen["target_programs"]
    return PagedAttentionConfig(**{"num_splits": int(whole), **chosen})


def invariant(**sizes: Any) -> PagedAttentionConfig:
    """For calls whose bits must not depend on the batch; `sizes` are those of `heuristic` that do not."""
    cores = sizes["device"].num_cores
    some = heuristic(num_seqs=8 * cores, num_kv_heads=1, max_len=2**20, **sizes)
    # How many programs there are decides when pieces are worked on, but not what is in them.
    return dataclasses.replace(
        some, split_tokens=INVARIANT_TOKENS, num_splits=INVARIANT_SPLITS, target_programs=8 * cores
    )


def _needed_kb(
    block_q: int,
    block_kv: int,
    num_stages: int,
    width: int,
    itemsize: int,
    query_itemsize: int,
    device: Device,
) -> float:
    """Shared memory of a program, measured on compiled kernels: the queries; two buffers for tiles of keys and values,
    three in a deep pipeline of asynchronous products, which may still read a tile when the next load is issued; and
    for a cache narrower than the queries a converted tile of each."""
    asynchronous = block_q == 64 and query_itemsize == 2 and device.asynchronous_products
    narrow = itemsize < query_itemsize
    buffers = 3 if asynchronous and num_stages > 3 and not narrow else 2
    token = 2 * buffers * itemsize + (2 * query_itemsize if narrow else 0)
    return (block_q * query_itemsize + block_kv * token) * width / 1024 + RESERVED_KB
