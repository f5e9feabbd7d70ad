"""What a call over paged sequences is, and what a split-KV decode kernel is compiled for."""

import dataclasses
import math
from abc import abstractmethod

import jax

from pallas_attn._call.configs import SplitKVConfig
from pallas_attn._tile.layout import PoolShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedCall:
    """The sizes that any call has. All of it static; what decides which implementation serves is added by an op's case,
    what its kernel is compiled for by its problem."""

    num_seqs: int
    q_len: int
    num_heads: int
    max_pages: int
    pool: PoolShape

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.pool.num_kv_heads

    @property
    def rows(self) -> int:
        """Query rows of a KV head; row r is query token r // group of head r % group."""
        return self.q_len * self.group

    @property
    def streams(self) -> int:
        """Walks over a cache: one for each sequence and KV head."""
        return self.num_seqs * self.pool.num_kv_heads

    @property
    def max_len(self) -> int:
        """Tokens that a row of the block table can hold."""
        return self.max_pages * self.pool.page_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitKVProblem(PagedCall):
    """An op's own problem adds its rules."""

    scale: float
    config: SplitKVConfig

    @property
    def q_blocks(self) -> int:
        """Programs that the query rows of a KV head are spread over."""
        return math.ceil(self.rows / self.config.block_q)

    @property
    def num_cut(self) -> int:
        """What is cut into pieces: sequences."""
        return self.num_seqs

    @property
    def num_pieces(self) -> int:
        """Partial results there is room for (see pieces.py); 0 if no sequence is ever cut."""
        return self.num_seqs * self.config.num_splits if self.config.num_splits > 1 else 0

    @property
    @abstractmethod
    def rounding(self) -> float:
        """How a sequence's number of fair shares is rounded: see pieces.py."""

    @abstractmethod
    def num_tiles(self, seq_len: jax.Array) -> jax.Array:
        """Tiles of `block_kv` tokens that the walk over a sequence of (clamped) length visits."""
