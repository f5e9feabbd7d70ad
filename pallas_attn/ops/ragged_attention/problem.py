"""What the ragged attention kernel is compiled for."""

import dataclasses
from collections.abc import Iterator

import jax

from pallas_attn._tile import masking
from pallas_attn._tile.layout import PoolShape
from pallas_attn.ops.ragged_attention.blocks import Ragged
from pallas_attn.ops.ragged_attention.config import RaggedTiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One launch of the kernel, over the sequences whose query rows it is shaped for; all of it static."""

    num_tokens: int
    num_seqs: int
    num_heads: int
    max_pages: int
    pool: PoolShape
    """Of the keys."""
    value_dim: int
    scale: float
    layout: str
    rules: masking.Rules
    causal: bool
    launches: tuple[RaggedTiles, ...]
    """Tiles of all launches of the call: one for all sequences, or a second one for those of few query rows."""
    launch: int = 0
    """Which of them this is."""

    def each(self) -> Iterator["Problem"]:
        return (dataclasses.replace(self, launch=i) for i in range(len(self.launches)))

    @property
    def config(self) -> RaggedTiles:
        return self.launches[self.launch]

    @property
    def is_short(self) -> bool:
        return self.launch == 1

    @property
    def short_rows(self) -> int:
        """Sequences of at most so many rows a KV head are the second launch's."""
        return self.launches[1].block_q if len(self.launches) > 1 else 0

    @property
    def group(self) -> int:
        return self.num_heads // self.pool.num_kv_heads

    @property
    def ragged(self) -> Ragged:
        return Ragged(self.num_tokens, self.num_seqs, self.group)

    @property
    def rows(self) -> int:
        """Query rows of a block."""
        return self.config.block_q

    @property
    def num_cut(self) -> int:
        """Blocks: of the short launch, one a sequence."""
        return self.num_seqs if self.is_short else self.ragged.blocks(self.rows)

    @property
    def max_len(self) -> int:
        return self.max_pages * self.pool.page_size

    @property
    def num_pieces(self) -> int:
        """Partial results there is room for; 0 if no block is ever cut."""
        return self.num_cut * self.config.num_splits if self.config.num_splits > 1 else 0

    def with_window(self, window: jax.Array) -> "Problem":
        """With a window that is known at run time only."""
        return dataclasses.replace(self, rules=self.rules._replace(sliding_window=window))
