"""What the block-sparse kernels are compiled for, and how they read their operands."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call import sizes
from pallas_attn._call.pools import PoolShape
from pallas_attn._tile import masking, pages, triton
from pallas_attn._tile.masking import Rules
from pallas_attn.ops.blocksparse_attention.config import BlockSparseConfig
from pallas_attn.ops.blocksparse_attention.layout import SparseLayout
from pallas_attn.ops.blocksparse_attention.operands import Operands


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """All static; fields are as in `Operands` unless described."""

    num_tokens: int
    """Queries of all sequences, and padding at the end."""
    num_seqs: int
    num_heads: int
    max_k_len: int
    pool: PoolShape
    cache_layout: str | None
    kinds: str
    scale: float
    rules: Rules
    config: BlockSparseConfig

    @classmethod
    def of(cls, operands: Operands, config: BlockSparseConfig = BlockSparseConfig()) -> "Problem":  # noqa: B008
        num_tokens, num_heads, _ = operands.query.shape
        # it counts all heads, and a device may have some
        if config.heads_together and num_heads % config.heads_together:
            config = dataclasses.replace(config, heads_together=0)
        return cls(
            num_tokens=num_tokens,
            num_seqs=operands.num_seqs,
            num_heads=num_heads,
            max_k_len=operands.max_k_len,
            pool=operands.pool,
            cache_layout=operands.cache_layout,
            kinds=operands.kinds,
            scale=operands.scale,
            rules=operands.rules,
            config=config,
        )

    @property
    def group(self) -> int:
        return self.num_heads // self.pool.num_kv_heads

    @property
    def decode_heads(self) -> int:
        """Heads that a program of decode serves."""
        return math.gcd(self.group, self.config.decode_heads)

    @property
    def dims(self) -> tuple[int, int]:
        """All of head_dim, as one chunk."""
        return sizes.whole(self.pool.head_dim)


class Keys(NamedTuple):
    """A sequence's keys and values, wherever they lie."""

    problem: Problem
    refs: Operands
    seq: jax.Array
    start: jax.Array
    """First row of the sequence, where keys lie in rows."""
    kv_head: jax.Array

    def read(
        self, which: Any, first: jax.Array, held: jax.Array | None, size: int, dtype: Any
    ) -> tuple[jax.Array, jax.Array | None]:
        """(keys or values [size, dims], whether the tokens' pages exist) from position `first` on; 0 where not `held`
        (None: all are). For keys in rows the second is None."""
        problem, ref = self.problem, getattr(self.refs, which)
        if problem.cache_layout is None:
            token = self.start + first + jnp.arange(size)
            return read_rows(ref, token, self.kv_head, problem, held).astype(dtype), None
        mask = jnp.ones(size, bool) if held is None else held
        column, offset = pages.slots(first, size, problem.pool.page_size)
        assert self.refs.block_tables is not None
        page = pages.look_up(self.refs.block_tables, self.seq, column, mask=mask, other=0)
        usable = masking.usable_pages(page, problem.pool.num_pages)
        place = (page, offset, self.kv_head, problem.dims)
        head_dim = problem.pool.head_dim
        tile = pages.gather(ref, problem.cache_layout, which, *place, mask & usable, head_dim=head_dim)
        return tile.astype(dtype), usable

    def read_up_to(
        self, which: Any, first: jax.Array, newest: jax.Array | None, size: int, dtype: Any
    ) -> tuple[jax.Array, jax.Array | None]:
        """The same up to position `newest` (None: no limit). Later tokens are filled with tokens of this sequence and
        must be masked."""
        problem = self.problem
        position = first + jnp.arange(size)
        if newest is None or problem.cache_layout is not None:
            return self.read(which, first, None if newest is None else position <= newest, size, dtype)
        # The newest one again, which is cheaper than a mask. Clipped, since a sequence may have none.
        token = jnp.clip(self.start + jnp.minimum(position, newest), 0, problem.pool.num_pages - 1)
        return read_rows(getattr(self.refs, which), token, self.kv_head, problem, None).astype(dtype), None


def read_rows(
    ref: Any,
    token: jax.Array,
    kv_head,
    problem: Problem,
    mask: jax.Array | None,
    *,
    eviction_policy: str | None = None,
) -> jax.Array:
    """Rows `token` of an array [tokens, kv_heads, head_dim]."""
    dim = jnp.arange(problem.dims[1])[None, :]
    zero = jnp.zeros((token.shape[0], problem.dims[1]), jnp.int32)
    place = ref.at[token[:, None] + zero, kv_head + zero, dim + zero]
    inside = zero == 0
    if mask is not None:
        inside = inside & mask[:, None]
    if problem.dims[1] > problem.pool.head_dim:
        inside = inside & (dim < problem.pool.head_dim)
    elif mask is None:
        return triton.load(place, eviction_policy=eviction_policy)
    return triton.load(place, mask=inside, other=0.0, eviction_policy=eviction_policy)


class Blocks(NamedTuple):
    """The blocks that one row of the layout lists for a head: entries [begin, end), of which those before `diagonal`
    lie wholly in the past."""

    layout: SparseLayout
    """Of refs."""
    head: jax.Array
    row: jax.Array
    begin: jax.Array
    diagonal: jax.Array
    end: jax.Array
    bad: jax.Array

    @classmethod
    def of_row(cls, layout: SparseLayout, head: jax.Array, row: jax.Array) -> "Blocks":
        """No entries for row -1, nor for a row that is not in the layout or points outside, which is bad."""
        head = head if layout.layout_heads > 1 else 0 * head
        inside = (row >= 0) & (row < layout.num_row_blocks)
        safe = jnp.where(inside, row, 0)
        begin, end = (triton.load(layout.row_pointers.at[head, safe + i]) for i in (np.int32(0), np.int32(1)))
        good = inside & (begin >= 0) & (begin <= end) & (end <= layout.columns.shape[1])
        begin, end = jnp.where(good, begin, 0), jnp.where(good, end, 0)
        diagonal = jnp.maximum(begin, end - layout.most_diagonal)
        return cls(layout, head, safe, begin, diagonal, end, ~good & (row >= 0))

    def near(self) -> "Near":
        """The blocks from `diagonal` on, loaded at once."""
        layout = self.layout
        entry = self.diagonal + jnp.arange(layout.most_diagonal)
        held = entry < self.end
        column, before = (
            triton.load(
                layout.columns.at[self.head + 0 * entry, at], mask=held & (at >= self.begin), other=-1
            )
            for at in (entry, entry - 1)
        )
        # Blocks are compared, not tokens: those of a column far outside would overflow int32.
        last, _ = divided((self.row + 1) * layout.q_block_size - 1, layout.block_size)
        good = (column > before) & (column <= last)
        return Near(self, column, _some(held & ~good))

    def column(self, entry: jax.Array) -> jax.Array:
        """The column of an entry; beyond the last, that of the last."""
        last = jnp.maximum(self.end - 1, 0)
        return triton.load(self.layout.columns.at[self.head, jnp.minimum(entry, last)])

    def ascends(self, entry: jax.Array, column: jax.Array) -> jax.Array:
        """Whether an entry's column is above that of the entry before it."""
        return (column > self.column(jnp.maximum(entry - 1, self.begin))) | (entry == self.begin)


class Near(NamedTuple):
    """The columns of a row that may reach into its own positions."""

    blocks: Blocks
    columns: jax.Array
    """-1: none."""
    bad: jax.Array
    """Whether one lies outside or does not ascend."""

    def lists(self, position: jax.Array) -> jax.Array:
        return _some(self.columns == divided(position, self.blocks.layout.block_size)[0])

    def number_before(self, position: jax.Array) -> jax.Array:
        """How many blocks the row lists before the block of `position`, which is one of the row's own or later."""
        block = divided(position, self.blocks.layout.block_size)[0]
        near = _number((self.columns >= 0) & (self.columns < block))
        return self.blocks.diagonal - self.blocks.begin + near


def _number(those: jax.Array) -> jax.Array:
    return jnp.sum(those.astype(jnp.int32))


def _some(those: jax.Array) -> jax.Array:
    return _number(those) > 0


def first_query(seq: jax.Array, stored: jax.Array) -> jax.Array:
    """First token of a sequence's queries, from its entry of cu_q_lens: sequence 0 starts at token 0, whatever is
    stored."""
    return jnp.where(seq == 0, 0, stored)


def divided(index: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """(index // size, index % size) for a power of two; index may be negative."""
    return index >> (size.bit_length() - 1), index & (size - 1)
