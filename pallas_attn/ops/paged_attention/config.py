"""Tile sizes of the paged attention kernel: of a list of candidates the cheapest (`_split/waves.py`)."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from pallas_attn._call import budget, configs, sizes
from pallas_attn._call.architecture import ASYNCHRONOUS_ROWS, LEAST_SIDE, WARPGROUP
from pallas_attn._call.budget import Candidate
from pallas_attn._call.checks import dtype_name, fail
from pallas_attn._call.configs import FixedSplitConfig
from pallas_attn._call.device import Device, current_device
from pallas_attn._call.sizes import tile_side
from pallas_attn._split import waves
from pallas_attn._split.splits import check_invariant
from pallas_attn._tile import walk
from pallas_attn.ops.paged_attention.operands import Operands

# They won somewhere on Hopper; on other GPUs they are candidates as far as they fit.
CANDIDATES = (Candidate(32, WARPGROUP, 7), Candidate(64, WARPGROUP, 5), Candidate(128, WARPGROUP, 3))
# Up to so many rows over bytes take their products transposed, on Hopper, in tiles of their own: the tensor core's
# second side is half its first. So are warps; and stages, for page ids take none.
TRANSPOSED_ROWS = LEAST_SIDE // 2
TRANSPOSED = (Candidate(CANDIDATES[1].block_kv, WARPGROUP // 2, (CANDIDATES[1].num_stages + 1) // 2),)
# Splits of a batch-invariant call: 128 programs for one sequence of 8192 tokens with 8 KV heads. Beyond 32768 tokens
# splits grow instead, or a wide table would ask for memory without end. So many programs a multiprocessor go through
# them, which decides when a split is worked on, not what is in it.
INVARIANT_TOKENS, INVARIANT_SPLITS, INVARIANT_PROGRAMS = 512, 64, 8

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
class Shape:
    """What of a call decides which tiles there are for it, whatever its batch."""

    rows: int
    """Query rows (tokens x heads of a group) that share a KV head."""
    head_dim: int
    itemsize: int
    """Bytes of an element of the cache."""
    query_itemsize: int
    device: Device
    layout: str = "NHD"
    row_bytes: int = 0
    """What mods read for each row and key."""

    @property
    def transposed(self) -> bool:
        bytes_meet_16_bits = (self.itemsize, self.query_itemsize) == (1, 2)
        few = (
            self.rows <= TRANSPOSED_ROWS
            and bytes_meet_16_bits
            and self.device.architecture.warpgroup_products
        )
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
            pair_bytes=self.row_bytes,
            exchanges_pairs=self.row_bytes > 0,
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
        block_q = TRANSPOSED_ROWS if self.transposed else min(ASYNCHRONOUS_ROWS, sizes.tile_side(self.rows))
        block_q = measured.get("block_q", block_q)
        known = {name: size for name, size in measured.items() if name in Candidate._fields}
        candidates = dict.fromkeys(candidate._replace(**known) for candidate in candidates)
        while True:
            tiles = [self.tile(block_q, candidate) for candidate in candidates]
            fitting = [tile for tile in tiles if self.takes(tile)]
            # Twice the warps share a tile too large for their registers: of asynchronous products, which wait for both
            # halves, and of float32 only rather than that two programs read the same keys.
            single = tiles[0].is_asynchronous(self.device) or self.query_itemsize != 2
            if "num_warps" not in measured and not (fitting and single):
                wider = (
                    dataclasses.replace(tile, num_warps=2 * tile.num_warps) for tile in tiles if tile.spills
                )
                fitting += [tile for tile in wider if self.takes(tile)]
            if fitting or "block_q" in measured or block_q <= LEAST_SIDE:
                break
            block_q //= 2
        if known.keys() == set(Candidate._fields):
            return tiles
        return fitting or [budget.fitted(tiles[0], self.device)]


@functools.cache
def heuristic(
    shape: Shape,
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
        for tile in shape.tiles(known):
            call = waves.Waves(
                tile,
                shape.device,
                walks=num_seqs * num_kv_heads * math.ceil(shape.rows / tile.rows),
                tokens=max_len,
                result_bytes=budget.FLOAT_BYTES * min(shape.rows, tile.rows) * shape.head_dim,
            )
            least = max(known.get("min_split_tokens", 0), tile.tokens)
            sizes = dict(_sizes(tile), min_split_tokens=least)
            if known.get("num_splits", 1) == 1:
                yield call.cost(1, whole=True), dict(sizes, num_splits=1, target_programs=call.walks)
            if known.get("num_splits") != 1:
                cost, splits = call.cheapest(max_len // least)
                yield cost, dict(sizes, num_splits=0, target_programs=call.target(splits))

    _, fields = min(plans(), key=lambda plan: plan[0])
    return PagedAttentionConfig(**{**fields, **known})


def _sizes(tile: budget.Tile) -> dict[str, int]:
    """The tile as a config has it."""
    return dict(block_q=tile.rows, block_kv=tile.tokens, num_warps=tile.num_warps, num_stages=tile.num_stages)


def invariant(shape: Shape) -> PagedAttentionConfig:
    """For calls whose bits must not depend on the batch: neither does anything that it goes by."""
    tile = max(shape.tiles({}), key=lambda tile: tile.tokens)
    return PagedAttentionConfig(
        **_sizes(tile),
        split_tokens=INVARIANT_TOKENS,
        min_split_tokens=INVARIANT_TOKENS,
        num_splits=INVARIANT_SPLITS,
        target_programs=INVARIANT_PROGRAMS * shape.device.num_cores,
    )


def max_len(operands: Operands) -> int:
    """Tokens that are walked over, whatever is held."""
    sizes = operands.sizes
    return walk.most_tokens(sizes.max_len, q_len=sizes.q_len, group=sizes.group, rules=operands.rules)


def key(operands: Operands) -> dict[str, Any] | None:
    """What measured files go by. None is for calls that none are measured for."""
    if operands.batch_invariant or operands.mods is not None:
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
    shape = Shape(
        rows=operands.sizes.rows,
        head_dim=operands.pool.head_dim,
        itemsize=operands.key_cache.dtype.itemsize,
        query_itemsize=operands.query.dtype.itemsize,
        device=current_device(),
        layout=operands.layout,
        row_bytes=0 if operands.mods is None else operands.mods.row_bytes,
    )
    if operands.batch_invariant:
        made = invariant(shape)
    else:
        made = heuristic(
            shape,
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
