"""Tile sizes of the MLA decode kernel, and the heuristic for devices without a measured file."""

import dataclasses
import math
from typing import Any

from pallas_attn._call.budget import Candidate
from pallas_attn._call.checks import dtype_name, fail
from pallas_attn._call.configs import FixedSplitConfig, TileConfig
from pallas_attn._call.device import Device, current_device
from pallas_attn._split import latent_problem
from pallas_attn._split.splits import check_invariant
from pallas_attn._tile.latents import BYTES
from pallas_attn.ops.mla_decode.operands import Operands
from pallas_attn.ops.mla_decode.schedule import BLOCK_TOKENS

# Of programs of so many rows, best first, if they fit: one fills a multiprocessor, by the deepest pipeline of the
# largest tile. The matrix units wait for memory with few query rows, and four warps read the queries fewer times from
# shared memory than eight; 32 rows in tiles of 64 spill with four, and 64 rows have sums for eight. Measured on Hopper
# (EXPERIMENTS.md).
CANDIDATES = {
    16: (Candidate(64, 4, 3), Candidate(32, 4, 4), Candidate(32, 4, 3), Candidate(16, 4, 3)),
    32: (Candidate(64, 8, 3), Candidate(32, 4, 4), Candidate(32, 4, 3), Candidate(16, 4, 3)),
    64: (Candidate(32, 8, 4), Candidate(32, 8, 3)),
}
# Over latents of bytes, which pass through registers on their way to bf16, and with four warps spill.
OF_BYTES = {
    16: (Candidate(64, 8, 3), Candidate(32, 8, 3), Candidate(16, 4, 3)),
    64: (Candidate(32, 8, 3),),
}
# Of transposed products, by a warpgroup for each 32 rows. Reductions take the weights' memory.
TRANSPOSED = {32: Candidate(64, 4, 2), 64: Candidate(64, 8, 2)}
# Where no other fits.
LEAST = Candidate(16, 4, 2)
# Splits of a batch-invariant call. Beyond 65536 tokens they grow, or a wide table would ask for memory without end.
INVARIANT_TOKENS, INVARIANT_SPLITS = 1024, 64
# Sequences as short as this are left whole where they keep this much of the multiprocessors busy, and in one wave.
# Neither is a schedule looked at then, nor is there a merge, which cost more than a few idle multiprocessors: of full
# tables 5 to 20%. The cost of paged decode (`_split/waves.py`) would deal those of 1024 tokens, since it weighs lengths
# that differ as much, which then gain 20 to 30% (EXPERIMENTS.md); whoever has those has a schedule.
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


def heuristic(
    *, rows: int, page_size: int, device: Device, fp8: bool = False, row_bytes: int | None = None
) -> MLADecodeConfig:
    """`rows` query rows share a KV head; `fp8` latents. `row_bytes`: where there are mods, what they read for each row
    and key."""
    block_q = latent_problem.block_q(rows, fp8, device)
    tile = _tile(block_q, page_size, device, fp8, row_bytes)._asdict()
    return MLADecodeConfig(block_q, min_split_tokens=BLOCK_TOKENS, target_programs=device.num_cores, **tile)


def whole(some: MLADecodeConfig, *, streams: int, rows: int, max_len: int, device: Device) -> bool:
    """Whether nothing is cut."""
    programs = streams * math.ceil(rows / some.block_q)
    return max_len <= WHOLE_TOKENS and MOSTLY_BUSY <= programs / device.num_cores <= 1


def is_transposed(config: TileConfig, *, page_size: int, device: Device, fp8: bool) -> bool:
    """Whether the kernel's products are transposed."""
    candidate = _transposed(config.block_q, page_size, device, fp8)
    return candidate is not None and candidate[:2] == (config.block_kv, config.num_warps)


def _transposed(block_q: int, page_size: int, device: Device, fp8: bool) -> Candidate | None:
    # Blackwell's asynchronous products are others.
    if not device.architecture.warpgroup_products or fp8:
        return None
    candidate = TRANSPOSED.get(block_q)
    return candidate if candidate is not None and page_size % candidate.block_kv == 0 else None


def invariant(some: MLADecodeConfig) -> MLADecodeConfig:
    """For calls whose bits must not depend on the batch, of which the heuristic knows nothing."""
    return dataclasses.replace(some, split_tokens=INVARIANT_TOKENS, num_splits=INVARIANT_SPLITS)


def _tile(block_q: int, page_size: int, device: Device, fp8: bool, row_bytes: int | None) -> Candidate:
    if row_bytes is None and (transposed := _transposed(block_q, page_size, device, fp8)):
        return transposed
    sizes: dict[str, Any] = dict(fp8=fp8, row_bytes=row_bytes or 0)
    candidates = (OF_BYTES if fp8 else CANDIDATES)[block_q]
    fitting = [one for one in candidates if latent_problem.needs(block_q, *one, **sizes).fits(device)]
    # Tiles inside a page need one look-up each; smaller ones than 32 tokens are not worth that.
    for one in fitting:
        if one.block_kv > LEAST.block_kv and page_size % one.block_kv == 0:
            return one
    best = (*fitting, LEAST)[0]
    # A look-up per token is a load before the load: each stage takes two.
    inside = page_size % best.block_kv == 0
    return best if inside else best._replace(num_stages=2 * best.num_stages - 1)


def check_fits(
    config: MLADecodeConfig, *, page_size: int, device: Device, fp8: bool, row_bytes: int | None = None
) -> None:
    """Of a caller's config: ValueError for tiles that no program has the shared memory for."""
    transposed = row_bytes is None and is_transposed(config, page_size=page_size, device=device, fp8=fp8)
    tile = latent_problem.needs(
        config.block_q,
        config.block_kv,
        config.num_warps,
        config.num_stages,
        fp8=fp8,
        transposed=transposed,
        looks_up=config.block_kv > BLOCK_TOKENS or page_size % config.block_kv > 0,
        row_bytes=row_bytes or 0,
    )
    # What is refused must not be what a compiler may find a place for.
    needed = tile.shared_bytes(device) if transposed else tile.operand_bytes(device)
    if needed > device.architecture.shared_bytes:
        sizes = f"block_q={config.block_q}, block_kv={config.block_kv}, num_stages={config.num_stages}"
        limit = f"tiles that fit in {device.architecture.shared_bytes} bytes of shared memory"
        fail("mla_decode", "config", limit, f"{needed} bytes for {sizes}")


def key(operands: Operands) -> dict[str, Any] | None:
    """What measured files go by. None is for calls that none are measured for."""
    if operands.batch_invariant or operands.mods is not None:
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
    mods = None if operands.mods is None else operands.mods.row_bytes
    some = heuristic(rows=sizes.rows, page_size=sizes.pool.page_size, device=device, fp8=fp8, row_bytes=mods)
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
        mods = None if operands.mods is None else operands.mods.row_bytes
        check_fits(config, page_size=operands.pool.page_size, device=device, fp8=fp8, row_bytes=mods)
