"""Flash attention in Pallas, forward: a program holds a block of queries and walks over the keys they see.

Gradients are in backward.py.
"""

import functools
import math

import jax
import jax.numpy as jnp

from pallas_attn._tile import dense, logits, low_bits, masking, softmax, triton, weights
from pallas_attn.mods import operands as mods
from pallas_attn.mods.program import KEY, QUERY
from pallas_attn.ops.flash_attention import scores, walk
from pallas_attn.ops.flash_attention.config import FlashAttentionConfig, FlashAttentionTiles
from pallas_attn.ops.flash_attention.operands import Operands
from pallas_attn.ops.flash_attention.problem import Problem


@functools.partial(jax.jit, static_argnames=("config", "keep", "lowering"))
def forward(
    operands: Operands,
    *,
    config: FlashAttentionConfig,
    keep: bool = False,
    lowering: triton.Lowering = "pallas",
) -> tuple[jax.Array, ...]:
    """(out in query's dtype, of query's shape with the values' width; the parts of its lse, of `scores`, each [batch,
    num_kv_heads, group, q_len]); with `keep`, of 16 bits, also a byte of out's lower bits, as out."""
    problem, tiles, query = Problem.of(operands), config.forward, operands.query
    out = jax.ShapeDtypeStruct((*query.shape[:-1], problem.value_dim), query.dtype)
    lower = [jax.ShapeDtypeStruct(out.shape, jnp.int8)] if keep and low_bits.are_lost(out.dtype) else []
    together = heads_together(problem)
    return triton.kernel_call(
        functools.partial(_forward_kernel, problem=problem, tiles=tiles),
        operands,
        name="pallas_attn_flash_attention",
        # The heads of a group are adjacent, since they read the same keys; then come blocks of the same heads.
        grid=(
            together * problem.group * problem.blocks("query", tiles.block_q),
            problem.num_kv_heads // together,
            problem.batch,
        ),
        out_shape=[
            out,
            *[jax.ShapeDtypeStruct(problem.lse_shape, jnp.float32)] * 2,
            *lower,
        ],
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        lowering=lowering,
    )


def heads_together(problem: Problem) -> int:
    """KV heads whose programs are interleaved. Several for wide heads, so that not all programs wait for the same keys;
    few enough that keys still hit the L2."""
    return math.gcd(problem.num_kv_heads, 8) if problem.widest > 128 else 1


def of_program(problem: Problem, num_blocks: int, together: int) -> tuple[scores.Cell, jax.Array]:
    """A program's head and its block: the last block first, where causal queries see most."""
    flat, kv_head, batch = (triton.program_id(axis) for axis in range(3))
    heads = together * problem.group
    index, head = num_blocks - 1 - flat // heads, flat % heads
    if together > 1:
        kv_head = kv_head * together + head // problem.group
    return scores.Cell(batch, kv_head, head % problem.group), index


def sides(refs: Operands, problem: Problem, tiles: FlashAttentionTiles) -> tuple[walk.Side, walk.Side]:
    """Queries and keys."""
    lists = (None, None) if refs.mods is None else (refs.mods.of_queries, refs.mods.of_keys)
    sizes = (0, 0) if refs.mods is None else refs.mods.block
    return (
        walk.Side(problem.q_len, tiles.block_q, refs.q_documents, lists[0], sizes[0]),
        walk.Side(problem.kv_len, tiles.block_kv, refs.kv_documents, lists[1], sizes[1]),
    )


def _forward_kernel(
    refs: Operands, out_ref, maximum_ref, rest_ref, *low_refs, problem: Problem, tiles: FlashAttentionTiles
):
    rules = problem.rules
    queries, keys = sides(refs, problem, tiles)
    cell, index = of_program(problem, problem.blocks("query", tiles.block_q), heads_together(problem))
    mine = walk.looked_up(walk.block(queries, cell.batch, index), queries, keys, cell)
    stream = dense.Stream(rules.layout, cell.batch, (cell.kv_head, cell.place))
    pool = dense.Stream(rules.layout, cell.batch, (cell.kv_head,))
    q = stream.read(refs.query, mine.tokens, mine.real, problem.query_chunks)
    of_mods = mods.over_refs(refs.mods, refs.captured, cell).at(QUERY, mine.tokens, problem.q_len)
    counted = None
    if low_refs and refs.value.dtype == jnp.float16:
        # An offset that values share is scaled by the sum of the rounded weights, which is not exactly 1. In fp16
        # gradients that shows, so here the rounded weights are summed.
        counted = weights.summed_as(jnp.float16)

    def step(state: softmax.OnlineSoftmax, tile: walk.Tile) -> softmax.OnlineSoftmax:
        k = pool.read(refs.key, tile.tokens, tile.held, problem.query_chunks)
        v = pool.read(refs.value, tile.tokens, tile.held, problem.value_chunks)
        query_at, key_at = mine.tokens[:, None], tile.tokens[None, :]
        real = mine.real[:, None] & tile.held[None, :]
        here = of_mods.at(KEY, tile.tokens, problem.kv_len, masked=tile.masked)
        given = scores.scores(refs, cell, logits.products(q, k, None), query_at, key_at, real, here)
        seen = scores.visible(rules.band, query_at, key_at, tile.masked, [tile.held[None, :]], here)
        shaped = given.logits if seen is None else masking.apply(given.logits, seen)
        state, shares = softmax.rescale(
            state, shaped, given.factor, exp2_below=triton.exp2_below_fused, counted=counted
        )
        shares = shares.astype(refs.value.dtype)
        acc = tuple(sums + triton.dot(shares, part) for sums, part in zip(state.acc, v, strict=True))
        return state._replace(acc=acc)

    def attend(part: walk.Part) -> None:
        sizes = tuple(size for _, size in problem.value_chunks)
        state = softmax.start((tiles.block_q,), sizes, late_sum=None if counted is None else weights.SUMS)
        state = walk.walk(mine, part, queries, keys, rules.band, cell, step, state)
        if refs.sinks is not None:
            sink = triton.load(refs.sinks.at[cell.kv_head, cell.place])
            scale = scores.natural_scale(refs)
            out, lse = softmax.finish_beside(state, scale, jnp.broadcast_to(sink, (tiles.block_q,)))
        else:
            out, lse = softmax.finish(state)
        stream.write(out_ref, mine.tokens, part.tokens, problem.value_chunks, out)
        for ref, values in zip((maximum_ref, rest_ref), lse, strict=True):
            triton.store(dense.per_token(ref, cell, mine.tokens), values, mask=part.tokens)
        for ref in low_refs:
            lower = [low_bits.of(x, x.astype(out_ref.dtype), ref.dtype) for x in out]
            stream.write(ref, mine.tokens, part.tokens, problem.value_chunks, lower)

    walk.parts(mine, attend)
