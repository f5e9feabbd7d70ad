"""Block-sparse prefill in Pallas: a program serves `block_q` queries of one head, which lie in one row of the layout.
It walks over the blocks that the row lists, those at the queries' own positions first, and keeps an online softmax in
float32.

A step loads its column and from there its keys: with three stages, Triton's pipeline loads keys two steps before they
are needed. Gradients are in backward.py.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._split import result
from pallas_attn._tile import logits, low_bits, masking, rows, softmax, triton
from pallas_attn.ops.blocksparse_attention import walk
from pallas_attn.ops.blocksparse_attention.operands import Operands
from pallas_attn.ops.blocksparse_attention.problem import Keys, Problem, read_rows

MOST_IN_L2 = 40 << 20  # of an A100's 40 MiB or an H100's 50; queries and outputs pass through it as well


def prefill(
    operands: Operands, *, problem: Problem, keep: bool = False, lowering: triton.Lowering
) -> tuple[jax.Array, ...]:
    """query [num_tokens, num_heads, head_dim] -> (out, lse [num_tokens, num_heads, 2] in its parts, of products) and,
    with `keep`, of 16 bits, a byte of out's lower bits, as out; of sequences with one query, where the call is mixed,
    nothing is written.
    """
    query, config = operands.query, problem.config
    together = heads_together(problem, query.dtype.itemsize)
    num_items = walk.num_items(problem)
    lower = [jax.ShapeDtypeStruct(query.shape, jnp.int8)] if keep and low_bits.are_lost(query.dtype) else []
    return tuple(
        triton.kernel_call(
            functools.partial(_prefill_kernel, problem=problem, num_items=num_items, together=together),
            operands,
            name="pallas_attn_blocksparse_prefill",
            grid=(together, num_items, problem.num_heads // together),
            out_shape=[
                jax.ShapeDtypeStruct(query.shape, query.dtype),
                jax.ShapeDtypeStruct((*query.shape[:2], 2), jnp.float32),
                *lower,
            ],
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            max_registers=config.max_registers,
            lowering=lowering,
        )
    )


def heads_together(problem: Problem, itemsize: int) -> int:
    """Query heads whose programs start together: all, if the L2 holds the keys and values of all KV heads for the
    longest sequence; otherwise those of one KV head at a time, so that random reads still hit the L2."""
    if problem.config.heads_together:
        return problem.config.heads_together
    kv_bytes = 2 * problem.max_k_len * problem.pool.num_kv_heads * problem.pool.head_dim * itemsize
    return problem.num_heads if kv_bytes <= MOST_IN_L2 else problem.group


def _prefill_kernel(
    refs: Operands,
    out_ref,
    lse_ref,
    *low_refs,
    problem: Problem,
    num_items: int,
    together: int,
):
    head = triton.program_id(2) * together + triton.program_id(0)
    tile = walk.tile_of(problem, refs, num_items - 1 - triton.program_id(1))
    kv_head = head // problem.group
    dims = problem.dims
    # For programs that share a multiprocessor: they have few registers, and while one waits the other computes. For
    # others it measured no better.
    shares = problem.config.max_registers > 0

    @triton.when(tile.any)
    def _():
        # Rows without a query load another's and are not written, which is cheaper than a mask.
        token = jnp.clip(tile.token, 0, problem.num_tokens - 1)
        q = read_rows(
            refs.query, token, head, problem, None, eviction_policy="evict_first" if shares else None
        )
        pool = Keys(problem, refs, tile.seq, tile.k_start, kv_head)

        def read(keys: walk.KeyTile):
            where = keys.first, keys.newest, problem.config.block_kv, q.dtype
            return pool.read_up_to("key", *where), pool.read_up_to("value", *where)

        walker = walk.Walker(read, functools.partial(_attend, q=q, problem=problem), early=not shares)
        state = softmax.start((tile.size,), dims[1])
        state, bad = walk.walk(refs.layout, head, tile, problem, walker, state)
        # NaN in the sums makes the outputs NaN, which is cheaper than a check of each element.
        state = state._replace(total=softmax.poison(state.total, bad))
        out, lse = softmax.finish(state)
        mine = tile.behind(bad) if shares else tile
        held = rows.Rows(mine.position, mine.real, kv_head, mine.token, head)
        done = result.Result(held, (mine.token,), [dims], [out], lse)
        result.store(done, (out_ref, lse_ref), 0, True)
        for ref in low_refs:
            result.store_out(
                done._replace(out=[low_bits.of(out, out.astype(refs.query.dtype), ref.dtype)]), ref
            )


def _attend(state, keys: walk.KeyTile, read: Any, *, q: jax.Array, problem: Problem):
    """The state after another tile of keys."""
    (tile_keys, usable), (values, _) = read
    products = triton.dot(q, tile_keys, trans_b=True)
    if usable is not None:
        # A page that does not exist makes everyone who looks at it NaN.
        wrong = ~usable
        if keys.newest is not None:
            wrong &= keys.first + jnp.arange(wrong.shape[0]) <= keys.newest
        products *= jnp.where(wrong, np.float32(np.nan), np.float32(1.0))[None, :]
    given = logits.shape(products, problem.rules, problem.scale, None, keys.first, keys.first)
    by = walk.spoiled(given.factor, keys.good)
    tile = given.logits if keys.seen is None else masking.apply(given.logits, keys.seen)
    # Measured: fewer instructions are faster with tiles of 64, not with larger ones.
    small = min(problem.config.block_q, problem.config.block_kv) <= 64
    apart = functools.partial(triton.exp2_below, exp2=triton.exp2)
    state, weights = softmax.rescale(state, tile, by, exp2_below=triton.exp2_below_fused if small else apart)
    new = triton.dot(weights.astype(values.dtype), values)
    return state._replace(acc=new if state.acc is None else state.acc + new)
