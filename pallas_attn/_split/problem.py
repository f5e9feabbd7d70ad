"""Sizes of a call over paged sequences, and what a split-KV decode kernel is compiled for."""

import dataclasses
import math
from abc import abstractmethod
from typing import ClassVar

import jax

from pallas_attn._call.configs import FixedSplitConfig, SplitKVConfig
from pallas_attn._call.pools import PoolShape, table_tokens
from pallas_attn._tile import rows
from pallas_attn._types import Array

# Added before a sequence's number of fair shares is rounded down. To nearest: where several programs share a
# multiprocessor, one too many waits only for the first to end.
TO_NEAREST = 0.5
# Down, up to an error in the last bit: where a program fills a multiprocessor, one program too many makes a batch of
# equal lengths take twice as long.
DOWN = 2.0**-10


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedCall:
    """The sizes that every paged call has; static. An op's problem adds what its kernel is compiled for."""

    num_seqs: int
    num_heads: int
    max_pages: int
    pool: PoolShape

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.pool.num_kv_heads

    @property
    def streams(self) -> int:
        """Walks over the cache: one for each sequence and KV head."""
        return self.num_seqs * self.pool.num_kv_heads

    @property
    def max_len(self) -> int:
        """Tokens that a row of the block table can hold."""
        return table_tokens(self.max_pages, self.pool.page_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeCall(PagedCall):
    """A call with equally many query tokens in each sequence."""

    q_len: int

    @classmethod
    def of(cls, query: Array, block_tables: Array, pool: PoolShape) -> "DecodeCall":
        num_seqs, q_len, num_heads, _ = query.shape
        sizes = dict(num_seqs=num_seqs, q_len=q_len, num_heads=num_heads)
        return DecodeCall(**sizes, max_pages=block_tables.shape[1], pool=pool)

    @property
    def rows(self) -> int:
        """Query rows of a KV head; row r is query token r // group of head r % group."""
        return self.q_len * self.group


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitKVProblem(DecodeCall):
    """An op's own problem adds its rules."""

    scale: float
    config: SplitKVConfig

    alone: ClassVar[bool] = False
    """Whether a program fills a multiprocessor."""

    @property
    def q_blocks(self) -> int:
        """Programs that share the query rows of a KV head."""
        return math.ceil(self.rows / self.config.block_q)

    def rows_of(self, head_block: jax.Array) -> rows.Rows:
        """The rows of program `head_block` of num_kv_heads x q_blocks."""
        return rows.of_program(head_block, block_q=self.config.block_q, num_rows=self.rows, group=self.group)

    def rows_across_heads(self, flat: jax.Array) -> rows.Rows:
        """The rows with these numbers, counted through all KV heads."""
        sizes = dict(num_kv_heads=self.pool.num_kv_heads, num_rows=self.rows, group=self.group)
        return rows.across_heads(flat, **sizes)

    @property
    def programs_per_split(self) -> int:
        """Each program serves one block of query rows of one KV head."""
        return self.pool.num_kv_heads * self.q_blocks

    @property
    def shares(self) -> float:
        """Shares that the batch's work is divided into: `target_programs` over the programs of a split."""
        return self.config.target_programs / self.programs_per_split

    @property
    def fixed_splits(self) -> bool:
        """Whether splits have a fixed length, whatever else is in the batch."""
        return self.split_tokens > 0

    @property
    def split_tokens(self) -> int:
        """Tokens of such a split, or 0."""
        return self.config.split_tokens if isinstance(self.config, FixedSplitConfig) else 0

    @property
    def split_tiles(self) -> int:
        """Tiles in a split of a fixed length."""
        return max(1, self.split_tokens // self.config.block_kv)

    @property
    def most_splits(self) -> int:
        """Most splits of a sequence: by their fixed length, or such that none is shorter than `min_split_tokens`."""
        config = self.config
        if self.fixed_splits:
            fit = math.ceil(math.ceil(self.most_tokens / config.block_kv) / self.split_tiles)
        else:
            fit = int(self.most_tokens / max(config.min_split_tokens, config.block_kv) + self.rounding)
        return max(1, min(fit, config.num_splits or fit))

    @property
    def most_cuts(self) -> int:
        """An upper bound of splits beyond each sequence's first, whatever the lengths.

        Shares add up to `shares`, and sequences with n cuts in all have at least n + 0.5 of them, since numbers are at
        most rounded to nearest (with a margin for float32's error). Where they are rounded up, splits are counted.
        """
        cuts = self.num_seqs * (self.most_splits - 1)
        if self.fixed_splits:
            return cuts
        return min(cuts, max(0, int(self.shares * (1 + 1e-5) + TO_NEAREST - 1)))

    @property
    def most_cut(self) -> int:
        """The most sequences that are cut."""
        return min(self.most_cuts, self.num_seqs)

    @property
    def num_items(self) -> int:
        """Work items of the grid: the most splits there may be."""
        return self.num_seqs + self.most_cuts

    @property
    def num_programs(self) -> int:
        """Programs that serve the work items, for each block of query rows.

        One for each item. Splits of a fixed length leave so many items empty that idle programs would take longer than
        the work: there programs loop over items. Elsewhere the loop's registers would cost one of four programs on a
        multiprocessor.
        """
        if not self.fixed_splits:
            return self.num_items
        return min(self.num_items, max(self.num_seqs, math.ceil(self.shares)))

    @property
    def num_places(self) -> int:
        """Places for partial results (see splits.py); 0 if no sequence is ever cut."""
        return self.most_cuts + self.most_cut

    @property
    def rounding(self) -> float:
        """How the number of fair shares of equal lengths is rounded."""
        return DOWN if self.alone else TO_NEAREST

    @property
    def ordered(self) -> bool:
        """Whether the kernel has the registers to put sequences in order."""
        return True

    @property
    def most_tokens(self) -> int:
        """An upper bound of the tokens that the walk over a sequence visits."""
        return self.max_len

    @abstractmethod
    def num_tiles(self, seq_len: jax.Array) -> jax.Array:
        """Tiles of `block_kv` tokens that the walk over a sequence of (clamped) length visits."""
