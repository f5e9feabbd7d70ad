"""The blocks of keys that some neighbouring queries of one head go over, which forward and backward share.

Programs find their sequence themselves: sequence i has the slots from cu_q_lens[i] // block_q + 2 * i on, two more than
its queries fill, since its first and last tiles may be partial. Late positions see most, and start first.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._tile import masking, triton
from pallas_attn.ops.blocksparse_attention.layout import SparseLayout
from pallas_attn.ops.blocksparse_attention.problem import Blocks, Problem, divided


class Tile(NamedTuple):
    """Some neighbouring queries of one sequence."""

    seq: jax.Array
    first: jax.Array
    """Position of the first, a multiple of block_q; below 0 before the sequence's start, and for padding."""
    position: jax.Array
    real: jax.Array
    any: jax.Array
    """Whether one of them is real."""
    newest: jax.Array
    """Position of the last that is."""
    token: jax.Array
    k_start: jax.Array
    bad: jax.Array
    """Whether the sequence's lengths cannot be right."""


def num_slots(problem: Problem) -> int:
    return problem.num_tokens // problem.config.block_q + 2 * problem.num_seqs + 1


def tile_of(problem: Problem, refs: dict[str, Any], slot: jax.Array) -> Tile:
    """The queries of a slot. Tokens behind the last sequence are those of one more, which has no keys."""
    block_q, num_seqs, tokens = problem.config.block_q, problem.num_seqs, problem.num_tokens
    cu_q_ref = refs["cu_q_lens"]
    seqs = jnp.arange(triton.next_power_of_2(num_seqs))
    ends = triton.load(cu_q_ref.at[jnp.minimum(seqs + 1, num_seqs)], mask=seqs < num_seqs, other=0)
    ends = jnp.clip(ends, 0, tokens)
    seq = jnp.sum(((seqs < num_seqs) & (ends // block_q + 2 * (seqs + 1) <= slot)).astype(jnp.int32))
    padding = seq == num_seqs
    own = jnp.minimum(seq, num_seqs - 1)
    q_start = jnp.clip(triton.load(cu_q_ref.at[seq]), 0, tokens)
    q_end = jnp.where(padding, tokens, triton.load(cu_q_ref.at[own + 1]))
    q_len = jnp.clip(q_end, q_start, tokens) - q_start
    if problem.cache_layout is None:
        k_start, k_end = (triton.load(refs["cu_k_lens"].at[own + i]) for i in (np.int32(0), np.int32(1)))
        bad = (k_start < 0) | (k_end < k_start) | (k_end > problem.pool.num_pages)
    else:
        k_start, k_end = 0 * own, triton.load(refs["seq_lens"].at[own])
        bad = (k_end < 0) | (k_end > problem.max_k_len)
    bad &= ~padding
    k_len = jnp.where(bad | padding, 0, k_end - k_start)
    before = k_len - q_len  # position of the first query
    index = slot - (q_start // block_q + 2 * seq)
    first = (before & -block_q) + index * block_q
    position = first + jnp.arange(block_q)
    some = (first < k_len) & (first + block_q > before)
    if problem.kinds == "mixed":
        some &= (q_len != 1) | padding
    real = (position >= before) & (position < k_len) & some
    newest = jnp.minimum(first + block_q, k_len) - 1
    return Tile(own, first, position, real, some, newest, q_start + position - before, k_start, bad)


class Keys(NamedTuple):
    """A tile of the keys that a row of the layout lists."""

    first: jax.Array
    """Position of the first."""
    held: jax.Array | None
    """Which of them may be read; None: all."""
    good: jax.Array | None
    """Whether its block lies inside; None where that is said of the whole row, behind the walk."""
    seen: jax.Array | None
    """[queries, keys] who sees whom; None: everyone all."""


type Step = Callable[[Any, Keys], Any]


def walk(
    layout: SparseLayout, head: jax.Array, tile: Tile, problem: Problem, step: Step, state: Any
) -> tuple[Any, jax.Array]:
    """(`state` after `step(state, keys)` for each tile of keys, in order; whether lengths or row cannot be right).

    Blocks that all queries see whole come first, and need no mask; those on the diagonal come last.
    """
    row = jnp.maximum(divided(tile.first, layout.q_block_size)[0], -1)
    blocks = Blocks.of_row(layout, head, row)
    state, bad = _full_blocks((state, tile.bad), blocks, problem, step)
    state, bad = _partial_blocks((state, bad), blocks, tile, problem, step)
    return state, bad | blocks.bad


def _full_blocks(carry, blocks: Blocks, problem: Problem, step: Step) -> tuple[Any, jax.Array]:
    size, block_kv = blocks.layout.block_size, problem.config.block_kv
    tiles = size // block_kv
    end = blocks.row * blocks.layout.q_block_size

    def one(i, carry):
        state, bad = carry
        block, part = divided(i, tiles)
        entry = blocks.begin + block
        column = blocks.column(entry)
        first = column * size + part * block_kv
        # The layout may have been traced: what points outside or does not ascend makes its rows NaN.
        inside = (column >= 0) & (first + block_kv <= end)
        state = step(state, Keys(jnp.where(inside, first, 0), None, inside, None))
        return state, bad | ~blocks.ascends(entry, column)

    return lax.fori_loop(0, (blocks.diagonal - blocks.begin) * tiles, one, carry)


def _partial_blocks(carry, blocks: Blocks, tile: Tile, problem: Problem, step: Step) -> tuple[Any, jax.Array]:
    """Of the last block, tiles that lie in every query's future are left out."""
    layout, block_kv = blocks.layout, problem.config.block_kv
    tiles = layout.block_size // block_kv
    row_end = (blocks.row + 1) * layout.q_block_size

    def one(i, carry):
        state, bad = carry
        block, part = divided(i, tiles)
        entry = blocks.diagonal + block
        column = blocks.column(entry)
        first = column * layout.block_size + part * block_kv
        position = first + jnp.arange(block_kv)
        inside = (column >= 0) & (column * layout.block_size < row_end)
        held = inside & (position <= tile.newest)
        seen = masking.causal(position[None, :], tile.position[:, None])
        state = step(state, Keys(jnp.where(inside, first, 0), held, None, seen))
        return state, bad | ~(inside & blocks.ascends(entry, column))

    number = (blocks.end - blocks.diagonal) * tiles
    behind = divided(tile.newest, block_kv)[0] + 1 - blocks.column(blocks.end - 1) * tiles
    # A tile at the least, so that a column that points outside is seen.
    visited = number - jnp.clip(tiles - behind, 0, tiles - 1)
    return lax.fori_loop(0, jnp.where(number > 0, visited, 0), one, carry)


def spoiled(factor: float, good: jax.Array | None) -> jax.Array | float:
    """`factor` of logits; NaN where a block is not `good`.

    Not for NaN alone, since the whole row is spoiled in the end. Triton's pipeline gives a load that only leads to
    addresses of other loads a stage of its own and a way through shared memory, so that keys are copied one step ahead
    instead of two. One that the next product depends on by another way as well is loaded plainly: so logits, which
    are `factor * products` in this order, depend on the column.
    """
    return factor if good is None else jnp.where(good, np.float32(factor), np.float32(np.nan))
