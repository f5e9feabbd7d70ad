"""Tile sizes of the sparse MLA kernel, and the heuristic."""

import dataclasses
import functools
import math
from typing import Any

from pallas_attn._call.budget import Candidate
from pallas_attn._call.checks import check_int, dtype_name
from pallas_attn._call.configs import TileConfig
from pallas_attn._call.device import Device, current_device
from pallas_attn._split import latent_problem, splits
from pallas_attn._tile.latents import BYTES
from pallas_attn.ops.sparse_mla.operands import Operands

MIN_SPLIT_IDS = 128
# Of programs of so many heads, best first, if they fit. Ids are a load before the load: each buffer takes two stages.
CANDIDATES = {
    16: (Candidate(64, 4, 5), Candidate(16, 4, 3)),
    32: (Candidate(64, 8, 5), Candidate(16, 8, 3)),
    64: (Candidate(32, 8, 5),),
}
# Over latents of bytes, which are converted in registers, and with four warps spill.
OF_BYTES = {16: (Candidate(64, 8, 5), Candidate(32, 8, 3)), 64: (Candidate(64, 8, 3),)}


@dataclasses.dataclass(frozen=True)
class SparseMLAConfig(TileConfig):
    """How one call of the kernel is cut up.

    block_q: heads of a query token that a program serves, a power of two >= 16.
    block_kv: tokens a program takes in per step, a power of two >= 16.
    num_splits: most splits that a query token's ids are cut into, each of as many tiles; at least 1.
    num_warps, num_stages: Triton's warps per program and depth of software pipelining.
    """

    num_splits: int = 1
    _: dataclasses.KW_ONLY
    num_warps: int = 8

    def __post_init__(self):
        super().__post_init__()
        check_int("SparseMLAConfig", "num_splits", self.num_splits, least=1)


def heuristic(*, num_tokens: int, num_heads: int, topk: int, fp8: bool, device: Device) -> SparseMLAConfig:
    """For `num_tokens` query tokens; splits only as far as the device would be idle without."""
    block_q = latent_problem.block_q(num_heads, fp8, device)
    candidates = (OF_BYTES if fp8 else CANDIDATES)[block_q]
    needs = functools.partial(latent_problem.needs, block_q, fp8=fp8, looks_up=True)
    tile = next((one for one in candidates if needs(*one).fits(device)), candidates[-1])
    programs = num_tokens * math.ceil(num_heads / block_q)
    num_splits = max(1, min(device.num_cores // programs, topk // MIN_SPLIT_IDS, splits.MOST_SPLITS))
    return SparseMLAConfig(block_q, num_splits=num_splits, **tile._asdict())


def key(operands: Operands) -> dict[str, Any]:
    """What measured files go by, in the words of all ops: a walk over a cache is here a query token's ids."""
    return dict(
        rows=operands.num_heads,
        dtype=dtype_name(operands.latent_cache.dtype),
        streams=operands.num_tokens,
        max_len=operands.topk,
    )


def default(operands: Operands, **measured: int) -> SparseMLAConfig:
    """As the heuristic has it for a call at hand."""
    made = heuristic(
        num_tokens=operands.num_tokens,
        num_heads=operands.num_heads,
        topk=operands.topk,
        fp8=operands.latent_cache.dtype == BYTES,
        device=current_device(),
    )
    # With the maxima there is no merging.
    return dataclasses.replace(made, **({"num_splits": 1} if operands.max_logits else {}), **measured)
