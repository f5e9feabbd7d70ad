"""The walk of some neighbouring queries of one head over blocks of keys, shared by forward and backward.

Programs find their sequence themselves: sequence i has the items from cu_q_lens[i] // block_q + 2 * i on, two more than
its queries fill, since its first and last tiles may be partial. Late positions see most and start first.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._call.sizes import next_power_of_2
from pallas_attn._tile import masking, triton
from pallas_attn.ops.blocksparse_attention.layout import SparseLayout
from pallas_attn.ops.blocksparse_attention.operands import Operands
from pallas_attn.ops.blocksparse_attention.problem import Blocks, Near, Problem, divided, first_query


class Tile(NamedTuple):
    """Some neighbouring queries of one sequence."""

    size: int
    seq: jax.Array
    first: jax.Array
    """Position of the first, a multiple of block_q; below 0 before the sequence's start, and for padding."""
    oldest: jax.Array
    """Position of the sequence's first query."""
    newest: jax.Array
    """Position of the tile's last real query."""
    any: jax.Array
    """Whether any query is real."""
    shift: jax.Array
    """From a query's position to its token."""
    k_start: jax.Array
    bad: jax.Array
    """Whether the sequence's lengths are invalid."""

    @property
    def position(self) -> jax.Array:
        return self.first + jnp.arange(self.size)

    @property
    def real(self) -> jax.Array:
        position = self.position
        return (position >= self.oldest) & (position <= self.newest) & self.any

    @property
    def token(self) -> jax.Array:
        return self.position + self.shift

    def behind(self, walked: jax.Array) -> "Tile":
        """The same tile, but opaque to the compiler: values computed from it are recomputed after the walk, where
        registers are free, instead of being kept across it. `walked` is any boolean that results from the walk."""
        never = walked & (self.newest < self.first)
        return self._replace(first=self.first + never.astype(jnp.int32))


def num_items(problem: Problem, block_q: int | None = None) -> int:
    return problem.num_tokens // (block_q or problem.config.block_q) + 2 * problem.num_seqs + 1


def tile_of(problem: Problem, refs: Operands, item: jax.Array) -> Tile:
    """The queries of a work item. Tokens after the last sequence form one more sequence, without keys.

    All lengths are loaded at once and the program's own picked from them: one load latency instead of two.
    """
    block_q, num_seqs, tokens = problem.config.block_q, problem.num_seqs, problem.num_tokens
    seqs = jnp.arange(next_power_of_2(num_seqs))
    real = seqs < num_seqs

    def lengths(ref: Any, shift: int) -> jax.Array:
        return triton.load(ref.at[jnp.minimum(seqs + shift, ref.shape[0] - 1)], mask=real, other=0)

    paged = problem.cache_layout is not None
    q_starts, q_ends = (lengths(refs.cu_q_lens, i) for i in (0, 1))
    k_starts, k_ends = (
        (0 * seqs, lengths(refs.seq_lens, 0)) if paged else (lengths(refs.cu_k_lens, i) for i in (0, 1))
    )
    filled = jnp.clip(q_ends, 0, tokens) // block_q
    seq = jnp.sum((real & (filled + 2 * (seqs + 1) <= item)).astype(jnp.int32))
    padding = seq == num_seqs
    own = jnp.minimum(seq, num_seqs - 1)
    q_start, q_end, k_start, k_end = (
        jnp.sum(jnp.where(seqs == own, all_lengths, 0))
        for all_lengths in (q_starts, q_ends, k_starts, k_ends)
    )
    q_start = first_query(own, q_start)
    q_start = jnp.clip(jnp.where(padding, q_end, q_start), 0, tokens)
    q_end = jnp.where(padding, tokens, q_end)
    q_len = jnp.clip(q_end, q_start, tokens) - q_start
    if paged:
        bad = (k_end < 0) | (k_end > problem.max_k_len)
    else:
        bad = (k_start < 0) | (k_end < k_start) | (k_end > problem.pool.num_pages)
    bad &= ~padding
    k_len = jnp.where(bad | padding, 0, k_end - k_start)
    before = k_len - q_len  # position of the first query
    index = item - (q_start // block_q + 2 * seq)
    first = (before & -block_q) + index * block_q
    some = (first < k_len) & (first + block_q > before)
    if problem.kinds == "mixed":
        some &= (q_len != 1) | padding
    newest = jnp.minimum(first + block_q, k_len) - 1
    return Tile(block_q, own, first, before, newest, some, q_start - before, k_start, bad)


class KeyTile(NamedTuple):
    """A tile of the keys that a row of the layout lists."""

    first: jax.Array
    """Position of the first key."""
    newest: jax.Array | None
    """Position of the last key that may be read; None: all may."""
    good: jax.Array | None
    """Whether the block is valid; None where the whole row is checked after the walk."""
    seen: jax.Array | None
    """[queries, keys] which are seen; None: all."""


class Walker(NamedTuple):
    """What to do with the visited keys."""

    read: Callable[[KeyTile], Any]
    step: Callable[[Any, KeyTile, Any], Any]
    """(state, None for the first tile; keys; what `read` returned) -> state."""
    early: bool = True
    """Whether to read keys at the queries' own positions before it is known that the row lists them: this hides the
    latency, and wastes the read if it does not."""


def walk(
    layout: SparseLayout, head: jax.Array, tile: Tile, problem: Problem, walker: Walker, state: Any
) -> tuple[Any, jax.Array]:
    """(`state` after a step for each tile of keys; whether lengths or row are invalid).

    Keys at the queries' own positions come first: their place is known before any column is, so they are loaded while
    row and columns are looked up. All others lie in every query's past: one loop without a mask.
    """
    row = jnp.maximum(divided(tile.first, layout.q_block_size)[0], -1)
    near = Blocks.of_row(layout, head, row).near()
    own = jnp.maximum(tile.first, 0) & -problem.config.block_kv
    state = _own_tiles(state, own, near, tile, problem, walker)
    state, bad = _past_tiles((state, tile.bad), own, near, problem, walker)
    return state, bad | near.blocks.bad | near.bad


def sample(layout: SparseLayout, head: jax.Array, tile: Tile, size: int) -> tuple[jax.Array, jax.Array]:
    """([size] positions, which of them exist), evenly spread over the newest block that the tile's queries see."""
    row = jnp.maximum(divided(tile.first, layout.q_block_size)[0], -1)
    near = Blocks.of_row(layout, head, row).near()
    blocks, newest = near.blocks, divided(tile.newest, layout.block_size)[0]
    older = jnp.where(blocks.diagonal > blocks.begin, blocks.column(blocks.diagonal - 1), -1)
    column = jnp.max(jnp.where(near.columns <= newest, near.columns, -1))
    column = jnp.maximum(column, jnp.where(older <= newest, older, -1))
    first = jnp.maximum(column, 0) * layout.block_size
    end = jnp.where(column < 0, 0, jnp.minimum(first + layout.block_size, tile.newest + 1))
    apart = jnp.maximum((end - first) // size, 1)
    position = first + apart // 2 + apart * jnp.arange(size)
    return position, position < end


def _own_tiles(state: Any, own: jax.Array, near: Near, tile: Tile, problem: Problem, walker: Walker) -> Any:
    """The tiles from position `own` on that the row lists."""
    block_kv = problem.config.block_kv
    number = max(1, problem.config.block_q // block_kv)

    def one(i: Any, before: Any, otherwise: Any) -> Any:
        first = own + i * block_kv
        position = first + jnp.arange(block_kv)
        keys = KeyTile(first, tile.newest, None, masking.causal(position[None, :], tile.position[:, None]))
        # Outside of the branch, so that the load need not wait for the columns.
        read = walker.read(keys) if walker.early else None
        wanted = near.lists(first) & (first <= tile.newest)
        return lax.cond(
            wanted, lambda: walker.step(before, keys, read or walker.read(keys)), lambda: otherwise
        )

    if number == 1:
        return one(0, None, state)
    return lax.fori_loop(0, number, lambda i, state: one(i, state, state), state)


def _past_tiles(
    carry: Any, own: jax.Array, near: Near, problem: Problem, walker: Walker
) -> tuple[Any, jax.Array]:
    """The tiles before position `own`."""
    blocks = near.blocks
    size, block_kv = blocks.layout.block_size, problem.config.block_kv
    tiles = size // block_kv

    def one(i, carry):
        state, bad = carry
        block, part = divided(i, tiles)
        entry = blocks.begin + block
        column = blocks.column(entry)
        first = column * size + part * block_kv
        # The layout may have been traced: rows that point outside or do not ascend become NaN. Checked here, on columns
        # that were loaded two steps ahead, which delays nothing.
        good = in_the_past(column, first, own - block_kv) & blocks.ascends(entry, column)
        keys = KeyTile(jnp.where(good, first, 0), None, good, None)
        return walker.step(state, keys, walker.read(keys)), bad | ~good

    of_own_block = jnp.where(near.lists(own), divided(divided(own, size)[1], block_kv)[0], 0)
    return lax.fori_loop(0, near.number_before(own) * tiles + of_own_block, one, carry)


def in_the_past(column: jax.Array, first: jax.Array, newest: jax.Array) -> jax.Array:
    """Whether a tile of block `column` that begins at position `first` lies in the sequence, at `newest` at the latest.
    For a column far outside, `first` has overflowed int32 and may pass if it falls into the sequence: nothing outside
    is read, and the row is caught because it does not ascend to its end."""
    return ((column | first) >= 0) & (first <= newest)


def spoiled(factor: Any, good: jax.Array | None) -> jax.Array | float:
    """`factor` of logits; NaN where a block is not `good`.

    The NaN alone would not need this, since the whole row is spoiled in the end. Triton's pipeliner gives a load that
    is only used for addresses of other loads a stage of its own, through shared memory, so keys are copied one step
    ahead instead of two. A load that the next product depends on otherwise, too, is a plain load: so logits, `factor *
    products` in this order, are made to depend on the column.
    """
    return factor if good is None else jnp.where(good, np.float32(factor), np.float32(np.nan))
