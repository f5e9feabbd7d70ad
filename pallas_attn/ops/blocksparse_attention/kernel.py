"""Block-sparse prefill in Pallas.

One program serves `block_q` queries of one head, which lie in one row of the layout: it walks the blocks that the row
lists and keeps an online softmax in float32. Blocks that all its queries see whole come first, and need no mask; those
on the diagonal come last. A step loads its column and from there its keys: Triton's pipeline, at three stages, has keys
on their way a step before they are needed, and their column two steps before.

Programs find their sequence themselves: sequence i has the slots from cu_q_lens[i] // block_q + 2 * i on, two more than
its queries fill, since its first and last tiles may be partial. Late positions see most, and start first.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._tile import logits, masking, result, rows, softmax, triton
from pallas_attn.ops.blocksparse_attention.layout import SparseLayout
from pallas_attn.ops.blocksparse_attention.problem import Blocks, Keys, Problem, divided, factor


def prefill(
    query: jax.Array,
    refs: dict[str, jax.Array],
    layout: SparseLayout,
    *,
    problem: Problem,
    lowering: triton.Lowering,
) -> tuple[jax.Array, jax.Array]:
    """query [num_tokens, num_heads, head_dim] -> (out, lse [num_tokens, num_heads]); of sequences with one query,
    where the call is mixed, nothing is written.

    `refs`: key, value, cu_q_lens, and cu_k_lens or (block_tables, seq_lens).
    """
    config = problem.config
    together = config.heads_together or problem.num_heads
    num_slots = problem.num_tokens // config.block_q + 2 * problem.num_seqs + 1
    out, lse = triton.kernel_call(
        functools.partial(_prefill_kernel, problem=problem, num_slots=num_slots, together=together),
        query,
        refs,
        layout,
        name="pallas_attn_blocksparse_prefill",
        grid=(together, num_slots, problem.num_heads // together),
        out_shape=[
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct(query.shape[:2], jnp.float32),
        ],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        lowering=lowering,
    )
    return out, lse


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


def _tile(problem: Problem, refs: dict[str, Any], slot: jax.Array) -> Tile:
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


def _prefill_kernel(
    query_ref, refs, layout: SparseLayout, out_ref, lse_ref, *, problem: Problem, num_slots: int, together: int
):  # fmt: skip
    head = triton.program_id(2) * together + triton.program_id(0)
    tile = _tile(problem, refs, num_slots - 1 - triton.program_id(1))
    kv_head = head // problem.group
    mine = rows.Rows(tile.position, tile.real, kv_head, tile.token, head)
    dims = problem.dims

    @triton.when(tile.any)
    def _():
        q = rows.load(query_ref, mine, (tile.token,), dims)
        row = jnp.maximum(divided(tile.first, layout.q_block_size)[0], -1)
        blocks = Blocks.of_row(layout, head, row)
        keys = Keys(problem, refs, tile.seq, tile.k_start, kv_head)
        state = softmax.start(tile.real.shape, dims[1])
        state, bad = _full_blocks((state, tile.bad), q, blocks, keys, problem)
        state, bad = _partial_blocks((state, bad), q, blocks, keys, tile, problem)
        out, lse2 = softmax.finish(state)
        bad |= blocks.bad
        done = result.Result(mine, (tile.token,), [dims], [out], lse2).poisoned(bad)
        result.store(done, (out_ref, lse_ref), 0, True)


def _full_blocks(carry, q, blocks: Blocks, keys: Keys, problem: Problem):
    """(the state, whether a block cannot be right) after the blocks that all queries see whole."""
    size, block_kv = blocks.layout.block_size, problem.config.block_kv
    tiles = size // block_kv
    end = blocks.row * blocks.layout.q_block_size

    def step(i, carry):
        state, bad = carry
        block, part = divided(i, tiles)
        entry = blocks.begin + block
        column = blocks.column(entry)
        first = column * size + part * block_kv
        # The layout may have been traced: what points outside or does not ascend makes its rows NaN.
        inside = (column >= 0) & (first + block_kv <= end)
        state = _attend(state, q, keys, jnp.where(inside, first, 0), None, inside, [], problem)
        return state, bad | ~blocks.ascends(entry, column)

    return lax.fori_loop(0, (blocks.diagonal - blocks.begin) * tiles, step, carry)


def _partial_blocks(carry, q, blocks: Blocks, keys: Keys, tile: Tile, problem: Problem):
    """The same after those that need a mask. Of the last, tiles that lie in every query's future are left out."""
    layout, block_kv = blocks.layout, problem.config.block_kv
    tiles = layout.block_size // block_kv
    row_end = (blocks.row + 1) * layout.q_block_size

    def step(i, carry):
        state, bad = carry
        block, part = divided(i, tiles)
        entry = blocks.diagonal + block
        column = blocks.column(entry)
        first = column * layout.block_size + part * block_kv
        position = first + jnp.arange(block_kv)
        inside = (column >= 0) & (column * layout.block_size < row_end)
        held = inside & (position <= tile.newest)
        masks = [masking.causal(position[None, :], tile.position[:, None])]
        state = _attend(state, q, keys, jnp.where(inside, first, 0), held, None, masks, problem)
        return state, bad | ~(inside & blocks.ascends(entry, column))

    number = (blocks.end - blocks.diagonal) * tiles
    behind = divided(tile.newest, block_kv)[0] + 1 - blocks.column(blocks.end - 1) * tiles
    # A tile at the least, so that a column that points outside is seen.
    visited = number - jnp.clip(tiles - behind, 0, tiles - 1)
    return lax.fori_loop(0, jnp.where(number > 0, visited, 0), step, carry)


def _attend(state, q, keys: Keys, first, held, good, masks, problem: Problem):
    """The state after one more tile of keys; NaN where it is not `good`, unless that is None."""
    block_kv = problem.config.block_kv
    tile_keys, usable = keys.read("key", first, held, block_kv, q.dtype)
    values, _ = keys.read("value", first, held, block_kv, q.dtype)
    products = triton.dot(q, tile_keys, trans_b=True)
    by = factor(problem)
    if good is not None:
        by = jnp.where(good, np.float32(by), np.float32(np.nan))
    if usable is not None:
        # A page that does not exist makes NaN whoever looks at it.
        wrong = ~usable if held is None else held & ~usable
        products *= jnp.where(wrong, np.float32(np.nan), np.float32(1.0))[None, :]
    if problem.rules.softcap is not None:
        products, by = logits.shape(products * by, problem.rules, None, first, first), None
    for mask in masks:
        products = masking.apply(products, mask)
    state, weights = softmax.rescale(state, products, by, exp2=triton.exp2)
    return state._replace(acc=state.acc + triton.dot(weights.astype(values.dtype), values))
