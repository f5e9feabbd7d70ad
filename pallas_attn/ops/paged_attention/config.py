"""Tile sizes of the paged attention kernel: of a list of candidates the cheapest (`_split/waves.py`)."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pallas_attn._call import budget, configs
from pallas_attn._call.checks import dtype_name, fail
from pallas_attn._call.configs import FixedSplitConfig
from pallas_attn._call.device import Device, current_device
from pallas_attn._call.sizes import tile_side
from pallas_attn._split import waves
from pallas_attn._split.splits import check_invariant
from pallas_attn._tile import walk
from pallas_attn.ops.paged_attention.operands import Operands


class Candidate(NamedTuple):
    """A tile that won somewhere on Hopper; on other GPUs it is one as far as it fits."""

    block_kv: int
    num_warps: int
    num_stages: int


CANDIDATES = (Candidate(32, 4, 7), Candidate(64, 4, 5), Candidate(128, 4, 3))
# Up to so many rows over bytes take their products transposed, on Hopper, in tiles of their own: the tensor core's
# second side is half its first.
TRANSPOSED_ROWS, TRANSPOSED = budget.LEAST_SIDE // 2, (Candidate(64, 2, 3),)
# Splits of a batch-invariant call: 128 programs for one sequence of 8192 tokens with 8 KV heads. Beyond 32768 tokens
# splits grow instead, or a wide table would ask for room without end.
INVARIANT_TOKENS, INVARIANT_SPLITS = 512, 64

POWERS_OF_TWO = {**configs.POWERS_OF_TWO, "block_q": TRANSPOSED_ROWS}


@dataclasses.dataclass(frozen=True)
class PagedAttentionConfig(FixedSplitConfig):
    """How one call of the kernel is cut up.

    block_q: query rows (tokens x heads) of one KV head that a program serves, a power of two >= 16, the tensor
        core's tile; or 8, for products that are transposed.
    block_kv: tokens a program takes in per step, a power of two >= 16.
    num_splits: most splits a sequence's tokens are cut into: 1 cuts none, 0 as many as the lengths ask for at run time.
    min_split_tokens: a split shorter than this costs more in merging than it gains in parallelism.
    target_programs: programs, over the whole device, that the run-time split aims at.
    split_tokens: above 0, splits have this many tokens, or more in sequences that would else have more than
        `num_splits`, instead of a share of the batch's work: what is cut where depends on the sequence alone.
    num_warps, num_stages: Triton's warps per program and depth of software pipelining.
    """

    def __post_init__(self):
        configs.check_sizes(self, POWERS_OF_TWO, may_be_zero=("num_splits", "split_tokens"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """What decides which tiles there are for a call, whatever its batch."""

    rows: int
    """Query rows (tokens x heads of a group) that share a KV head."""
    head_dim: int
    itemsize: int
    """Bytes of an element of the cache."""
    query_itemsize: int
    device: Device
    layout: str = "NHD"

    @property
    def transposed(self) -> bool:
        bytes_meet_16_bits = (self.itemsize, self.query_itemsize) == (1, 2)
        few = self.rows <= TRANSPOSED_ROWS and bytes_meet_16_bits and self.device.is_hopper
        # Others spill: PACKED values, and those of wide heads.
        return few and self.layout != "PACKED" and not self.tile(TRANSPOSED_ROWS, TRANSPOSED[0]).spills

    def tile(self, block_q: int, candidate: Candidate) -> budget.Tile:
        width = tile_side(self.head_dim)
        tile = budget.Tile(
            rows=block_q,
            tokens=candidate.block_kv,
            held=(width,),
            walked=(width, width),
            itemsize=self.query_itemsize,
            stored=self.itemsize,
            num_warps=candidate.num_warps,
            num_stages=candidate.num_stages,
        )
        # Page ids are copied too where a tile has fewer tokens than the program threads; and wait, as do ids that stay
        # in registers, where products are asynchronous. Those of transposed products come from the step before.
        waits = candidate.block_kv < tile.threads or tile.is_asynchronous(self.device)
        return dataclasses.replace(tile, looks_up=waits and block_q != TRANSPOSED_ROWS)

    def takes(self, tile: budget.Tile) -> bool:
        """Whether there is room for it."""
        # PACKED tokens are put in order in registers, for which a thread has room that has less than one.
        in_order = self.layout != "PACKED" or tile.tokens < tile.threads
        return in_order and tile.fits(self.device) and not tile.spills

    def tiles(self, measured: Mapping[str, int]) -> list[budget.Tile]:
        """That fit, of as many rows as leave room for any; `measured` sizes are as they are."""
        candidates = TRANSPOSED if self.transposed else CANDIDATES
        block_q = TRANSPOSED_ROWS if self.transposed else min(budget.ASYNCHRONOUS_ROWS, tile_side(self.rows))
        block_q = measured.get("block_q", block_q)
        known = {name: size for name, size in measured.items() if name in Candidate._fields}
        candidates = dict.fromkeys(candidate._replace(**known) for candidate in candidates)
        while True:
            tiles = [self.tile(block_q, candidate) for candidate in candidates]
            fitting = [tile for tile in tiles if self.takes(tile)]
            if fitting or "block_q" in measured or block_q <= budget.LEAST_SIDE:
                break
            block_q //= 2
        if known.keys() == set(Candidate._fields):
            return tiles
        return fitting or [budget.fitted(tiles[0], self.device)]


@functools.cache
def heuristic(
    kind: Kind,
    *,
    num_seqs: int,
    num_kv_heads: int,
    max_len: int,
    measured: frozenset[tuple[str, int]] = frozenset(),
) -> PagedAttentionConfig:
    """The cheapest plan for a batch whose rows of the block table hold `max_len` tokens. `measured` are fields of the
    config that are known better."""
    known = dict(measured)

    def plans() -> Iterator[tuple[float, dict[str, int]]]:
        for tile in kind.tiles(known):
            call = waves.Waves(
                tile,
                kind.device,
                walks=num_seqs * num_kv_heads * math.ceil(kind.rows / tile.rows),
                tokens=max_len,
                result_bytes=budget.FLOAT_BYTES * min(kind.rows, tile.rows) * kind.head_dim,
            )
            sizes = _sizes(tile)
            if known.get("num_splits", 1) == 1:
                yield call.cost(1, whole=True), dict(sizes, num_splits=1, target_programs=call.walks)
            if known.get("num_splits") == 1:
                continue
            least = max(known.get("min_split_tokens", 0), tile.tokens)
            cost, splits = call.cheapest(max_len // least)
            dealt = dict(num_splits=0, target_programs=call.target(splits), min_split_tokens=least)
            yield cost, sizes | dealt

    _, fields = min(plans(), key=lambda plan: plan[0])
    return PagedAttentionConfig(**{**fields, **known})


def _sizes(tile: budget.Tile) -> dict[str, int]:
    """The tile as a config has it."""
    return dict(block_q=tile.rows, block_kv=tile.tokens, num_warps=tile.num_warps, num_stages=tile.num_stages)


def invariant(kind: Kind) -> PagedAttentionConfig:
    """For calls whose bits must not depend on the batch: neither does anything that it goes by."""
    tile = max(kind.tiles({}), key=lambda tile: tile.tokens)
    return PagedAttentionConfig(
        **_sizes(tile),
        split_tokens=INVARIANT_TOKENS,
        num_splits=INVARIANT_SPLITS,
        # How many programs there are decides when splits are worked on, but not what is in them.
        target_programs=8 * kind.device.num_cores,
    )


def max_len(operands: Operands) -> int:
    """Tokens that are walked over, whatever is held."""
    sizes = operands.sizes
    return walk.most_tokens(sizes.max_len, q_len=sizes.q_len, group=sizes.group, rules=operands.rules)


def key(operands: Operands) -> dict[str, Any] | None:
    """What measured files go by."""
    if operands.batch_invariant:
        return None
    return dict(
        head_dim=operands.pool.head_dim,
        rows=operands.sizes.rows,
        page_size=operands.pool.page_size,
        dtype=dtype_name(operands.key_cache.dtype),
        query_itemsize=operands.query.dtype.itemsize,
        layout=operands.layout,
        streams=operands.sizes.streams,
        max_len=max_len(operands),
    )


def default(operands: Operands, **measured: int) -> PagedAttentionConfig:
    """As the heuristic has it for a call at hand."""
    kind = Kind(
        rows=operands.sizes.rows,
        head_dim=operands.pool.head_dim,
        itemsize=operands.key_cache.dtype.itemsize,
        query_itemsize=operands.query.dtype.itemsize,
        device=current_device(),
        layout=operands.layout,
    )
    if operands.batch_invariant:
        made = invariant(kind)
    else:
        made = heuristic(
            kind,
            num_seqs=operands.sizes.num_seqs,
            num_kv_heads=operands.pool.num_kv_heads,
            max_len=max_len(operands),
            measured=frozenset(measured.items()),
        )
    # A tile lies within one block of the pattern.
    return dataclasses.replace(made, block_kv=min(made.block_kv, _most_block_kv(operands) or made.block_kv))


def check(operands: Operands, config: PagedAttentionConfig) -> None:
    """Refuses a caller's config."""
    check_invariant("paged_attention", config, operands.batch_invariant)
    if (most := _most_block_kv(operands)) is not None and config.block_kv > most:
        expected = f"block_kv at most block_sparse.block_size ({most})"
        fail("paged_attention", "config", expected, str(config.block_kv))


def _most_block_kv(operands: Operands) -> int | None:
    pattern = operands.rules.block_sparse
    return None if pattern is None else pattern.block_size
