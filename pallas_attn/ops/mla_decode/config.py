"""Tile sizes of the MLA decode kernel, and the heuristic for devices without a measured file."""

import dataclasses
import math
from typing import Any

from pallas_attn._call.checks import dtype_name, fail
from pallas_attn._call.configs import FixedSplitConfig, TileConfig
from pallas_attn._call.device import Device, current_device
from pallas_attn._split import latent_problem
from pallas_attn._split.splits import check_invariant
from pallas_attn._tile.latents import BYTES
from pallas_attn.ops.mla_decode.operands import Operands
from pallas_attn.ops.mla_decode.schedule import BLOCK_TOKENS

MIN_SPLIT_TOKENS = 64
# Splits of a batch-invariant call. Beyond 65536 tokens they grow, or a wide table would ask for room without end.
INVARIANT_TOKENS, INVARIANT_SPLITS = 1024, 64
TRANSPOSED_TOKENS = 64  # of a tile whose products are transposed
TRANSPOSED_WARPS = {32: 4, 64: 8}  # of programs with so many rows
# Sequences as short as this are left whole where they keep this much of the multiprocessors busy, and in one wave.
WHOLE_TOKENS, MOSTLY_BUSY = 1024, 0.7


@dataclasses.dataclass(frozen=True)
class MLADecodeConfig(FixedSplitConfig):
    """How one call of the kernel is cut up.

    block_q: query rows (q_len x heads of one KV head) that a program serves, a power of two >= 16.
    block_kv: tokens a program takes in per step, a power of two >= 16.
    num_splits: without a schedule, most splits a sequence's tokens are cut into: 1 cuts none, 0 as many as the lengths
        ask for at run time.
    min_split_tokens: without a schedule, a split shorter than this costs more in merging than it gains.
    target_programs: without a schedule, programs, over the whole device, that the run-time split aims at.
    split_tokens: above 0, splits have this many tokens, or more in sequences that would else have more than
        `num_splits`, instead of a share of the batch's work: what is cut where depends on the sequence alone.
    num_warps, num_stages: Triton's warps per program and depth of software pipelining.

    On sm_90, tiles of 64 tokens inside a page go to four warps, a warpgroup, for each 32 rows, with products transposed
    (transposed.py); 16 rows and fp8 latents do not.
    """

    _: dataclasses.KW_ONLY
    num_warps: int = 8
    target_programs: int = 132


def heuristic(*, rows: int, page_size: int, device: Device, fp8: bool = False) -> MLADecodeConfig:
    """`rows` query rows share a KV head; `fp8` latents."""
    block_q = latent_problem.block_q(rows, fp8, device)
    block_kv, num_warps, num_stages = _tile(block_q, page_size, device, fp8)
    return MLADecodeConfig(
        block_q,
        block_kv,
        min_split_tokens=MIN_SPLIT_TOKENS,
        target_programs=device.num_cores,
        num_warps=num_warps,
        num_stages=num_stages,
    )


def whole(some: MLADecodeConfig, *, streams: int, rows: int, max_len: int, device: Device) -> bool:
    """Whether nothing is cut: neither is a schedule looked at then, nor is there a kernel for the merge. Those cost
    more than a few idle multiprocessors, or waiting for the longest sequence."""
    programs = streams * math.ceil(rows / some.block_q)
    return max_len <= WHOLE_TOKENS and MOSTLY_BUSY <= programs / device.num_cores <= 1


def is_transposed(config: TileConfig, *, page_size: int, device: Device, fp8: bool) -> bool:
    """Whether the kernel's products are transposed."""
    turns = config.block_kv == TRANSPOSED_TOKENS and config.num_warps == TRANSPOSED_WARPS.get(config.block_q)
    return turns and _may_turn(page_size, device, fp8)


def _may_turn(page_size: int, device: Device, fp8: bool) -> bool:
    # Blackwell's asynchronous products are others.
    return device.compute_capability in (None, 90) and page_size % TRANSPOSED_TOKENS == 0 and not fp8


def invariant(some: MLADecodeConfig) -> MLADecodeConfig:
    """For calls whose bits must not depend on the batch, of which the heuristic knows nothing."""
    return dataclasses.replace(some, split_tokens=INVARIANT_TOKENS, num_splits=INVARIANT_SPLITS)


def _tile(block_q: int, page_size: int, device: Device, fp8: bool) -> tuple[int, int, int]:
    """(block_kv, num_warps, num_stages): the deepest pipeline of the largest tile that shared memory holds.

    One program fills a multiprocessor. The matrix units wait for memory with few query rows, and four warps
    read the queries fewer times from shared memory than eight; 32 rows in tiles of 64 spill with four unless
    they are transposed, and 64 rows have accumulators for eight. fp8 latents pass through registers on their way
    to bf16, which with four warps spill.
    """
    asynchronous = block_q >= latent_problem.WGMMA_ROWS
    if block_q in TRANSPOSED_WARPS and _may_turn(page_size, device, fp8):
        # Reductions need no room of their own: they take the weights'.
        return TRANSPOSED_TOKENS, TRANSPOSED_WARPS[block_q], 2
    if fp8:
        tiles = [(32, 8, 3)] if asynchronous else [(64, 8, 3), (32, 8, 3), (16, 4, 3)]
    elif asynchronous:
        tiles = [(32, 8, 4), (32, 8, 3)]
    else:
        tiles = [(64, 8 if block_q == 32 else 4, 3), (32, 4, 4), (32, 4, 3), (16, 4, 3)]

    fitting = [tile for tile in tiles if latent_problem.needs(block_q, *tile, fp8=fp8).fits(device)] or [
        (16, 4, 2)
    ]
    # Tiles inside a page need one look-up each; smaller ones than 32 tokens are not worth that.
    for tile in fitting:
        if tile[0] >= 32 and page_size % tile[0] == 0:
            return tile
    block_kv, num_warps, num_stages = fitting[0]
    # A look-up per token is a load before the load: each stage takes two.
    return block_kv, num_warps, num_stages if page_size % block_kv == 0 else 2 * num_stages - 1


def check_fits(config: MLADecodeConfig, *, page_size: int, device: Device, fp8: bool) -> None:
    """Of a caller's config: ValueError for tiles that no program has the shared memory for."""
    transposed = is_transposed(config, page_size=page_size, device=device, fp8=fp8)
    tile = latent_problem.needs(
        config.block_q,
        config.block_kv,
        config.num_warps,
        config.num_stages,
        fp8=fp8,
        transposed=transposed,
        looks_up=config.block_kv > BLOCK_TOKENS or page_size % config.block_kv > 0,
    )
    # What is refused must not be what a compiler may find a place for.
    needed = tile.shared_bytes(device) if transposed else tile.operand_bytes(device)
    if needed > device.shared_bytes:
        sizes = f"block_q={config.block_q}, block_kv={config.block_kv}, num_stages={config.num_stages}"
        limit = f"tiles that fit in {device.shared_bytes} bytes of shared memory"
        fail("mla_decode", "config", limit, f"{needed} bytes for {sizes}")


def key(operands: Operands) -> dict[str, Any] | None:
    """What measured files go by."""
    if operands.batch_invariant:
        return None
    return dict(
        rows=operands.sizes.rows,
        page_size=operands.pool.page_size,
        dtype=dtype_name(operands.latent_cache.dtype),
        scheduled=operands.schedule is not None,
        streams=operands.sizes.streams,
        max_len=operands.sizes.max_len,
    )


def default(operands: Operands, **measured: int) -> MLADecodeConfig:
    """As the heuristic has it for a call at hand."""
    sizes, device, fp8 = operands.sizes, current_device(), operands.latent_cache.dtype == BYTES
    some = heuristic(rows=sizes.rows, page_size=sizes.pool.page_size, device=device, fp8=fp8)
    if operands.batch_invariant:
        return invariant(some)
    if whole(some, streams=sizes.streams, rows=sizes.rows, max_len=sizes.max_len, device=device):
        some = dataclasses.replace(some, num_splits=1)
    return dataclasses.replace(some, **measured)


def check(operands: Operands, config: MLADecodeConfig) -> None:
    """Refuses a caller's config."""
    check_invariant("mla_decode", config, operands.batch_invariant)
    device, fp8 = current_device(), operands.latent_cache.dtype == BYTES
    if device.platform == "gpu":
        check_fits(config, page_size=operands.pool.page_size, device=device, fp8=fp8)
