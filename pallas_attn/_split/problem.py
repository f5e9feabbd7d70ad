"""What a call over paged sequences is, and what a split-KV decode kernel is compiled for."""

import dataclasses
import math
from abc import abstractmethod
from typing import ClassVar

import jax

from pallas_attn._call.configs import SplitKVConfig
from pallas_attn._tile import rows
from pallas_attn._tile.layout import PoolShape, table_tokens
from pallas_attn._types import Array

# What is added before a sequence's number of fair shares is rounded down.
# Where several programs share a multiprocessor, one more than there is room for waits only for the first that ends.
TO_NEAREST = 0.5
# Where a program fills a multiprocessor, one more than there are multiprocessors would make a batch of equal lengths
# take twice as long. Rounded down, but not for an error in the last bit.
DOWN = 2.0**-10


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedCall:
    """The sizes that any call has. All of it static; what decides which implementation serves is added by an op's case,
    what its kernel is compiled for by its problem."""

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
        """Walks over a cache: one for each sequence and KV head."""
        return self.num_seqs * self.pool.num_kv_heads

    @property
    def max_len(self) -> int:
        """Tokens that a row of the block table can hold."""
        return table_tokens(self.max_pages, self.pool.page_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeCall(PagedCall):
    """With as many query tokens of each sequence."""

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
        """Programs that the query rows of a KV head are spread over."""
        return math.ceil(self.rows / self.config.block_q)

    def rows_of(self, head_block: jax.Array) -> rows.Rows:
        """Of program `head_block` of num_kv_heads x q_blocks."""
        return rows.of_program(head_block, block_q=self.config.block_q, num_rows=self.rows, group=self.group)

    def rows_across_heads(self, flat: jax.Array) -> rows.Rows:
        """Of their numbers through all KV heads."""
        sizes = dict(num_kv_heads=self.pool.num_kv_heads, num_rows=self.rows, group=self.group)
        return rows.across_heads(flat, **sizes)

    @property
    def programs_per_split(self) -> int:
        """Each serves the query rows of one block of one KV head."""
        return self.pool.num_kv_heads * self.q_blocks

    @property
    def shares(self) -> float:
        """Of the batch's work: `target_programs` over the programs of a split."""
        return self.config.target_programs / self.programs_per_split

    @property
    def fixed_splits(self) -> bool:
        """Whether splits have a length of their own, whatever else is in the batch."""
        return self.config.split_tokens > 0

    @property
    def split_tiles(self) -> int:
        """Tiles in a split of a fixed length."""
        return max(1, self.config.split_tokens // self.config.block_kv)

    @property
    def most_splits(self) -> int:
        """Of one sequence: as many as its walk has fixed lengths, or none that is shorter than `min_split_tokens`."""
        config = self.config
        if config.split_tokens:
            fit = math.ceil(math.ceil(self.most_tokens / config.block_kv) / self.split_tiles)
        else:
            fit = int(self.most_tokens / max(config.min_split_tokens, config.block_kv) + self.rounding)
        return max(1, min(fit, config.num_splits or fit))

    @property
    def most_cuts(self) -> int:
        """Of all sequences, whatever their lengths: splits beyond the first of each.

        Shares add up to `shares`, and sequences that are cut n times in all have at least n + 0.5 of them, as numbers
        are rounded to the nearest at most. (With room for what a quotient in float32 may be off.) Where they are
        rounded up, splits are counted.
        """
        cuts = self.num_seqs * (self.most_splits - 1)
        if self.config.split_tokens:
            return cuts
        return min(cuts, max(0, int(self.shares * (1 + 1e-5) + TO_NEAREST - 1)))

    @property
    def most_cut(self) -> int:
        """Sequences that are cut."""
        return min(self.most_cuts, self.num_seqs)

    @property
    def num_slots(self) -> int:
        """Splits that there may be."""
        return self.num_seqs + self.most_cuts

    @property
    def num_programs(self) -> int:
        """That go through the slots, for each block of query rows.

        One for each; but splits of a fixed length may be so many that programs without one would take longer than the
        work. A loop over slots takes registers, which elsewhere would cost a program of the four on a multiprocessor.
        """
        if not self.config.split_tokens:
            return self.num_slots
        return min(self.num_slots, max(self.num_seqs, math.ceil(self.shares)))

    @property
    def num_places(self) -> int:
        """Partial results there is room for (see splits.py); 0 if no sequence is ever cut."""
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
        """That the walk over any sequence comes past, or more."""
        return self.max_len

    @abstractmethod
    def num_tiles(self, seq_len: jax.Array) -> jax.Array:
        """Tiles of `block_kv` tokens that the walk over a sequence of (clamped) length visits."""
