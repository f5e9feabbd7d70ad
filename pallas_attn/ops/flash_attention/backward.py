"""Flash attention in Pallas, backward: gradients of queries, of keys and values, and of a bias.

Nothing of size queries x keys was kept: each kernel recomputes the weights of its tiles from the log-sum-exp (Dao et
al., 2022). Every sum is computed by one program in a fixed order, so the same inputs give the same bits; that takes one
kernel for queries and one for keys, and weights are recomputed in both.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._call.device import current_device
from pallas_attn._call.sizes import Chunk
from pallas_attn._tile import dense, logits, low_bits, softmax, triton, weights
from pallas_attn.mods import operands as mods
from pallas_attn.mods.derivative import slope
from pallas_attn.mods.program import KEY, QUERY, Program
from pallas_attn.mods.simplify import in_floats
from pallas_attn.ops.flash_attention import scores, walk
from pallas_attn.ops.flash_attention.config import FlashAttentionConfig, FlashAttentionTiles, fitted
from pallas_attn.ops.flash_attention.kernel import of_program, sides
from pallas_attn.ops.flash_attention.operands import BackwardOperands
from pallas_attn.ops.flash_attention.problem import Problem

SAMPLE = 16  # sampled keys, whose mean estimates the offset that all share


@functools.partial(jax.jit, static_argnames=("config", "lowering"))
def backward(
    operands: BackwardOperands, *, config: FlashAttentionConfig, lowering: triton.Lowering = "pallas"
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of query, key and value, in their shapes and dtypes."""
    problem = Problem.of(operands)
    query, key, value = (
        jax.ShapeDtypeStruct(array.shape, array.dtype)
        for array in (operands.query, operands.key, operands.value)
    )

    def call(
        kernel: Any, name: str, tiles: FlashAttentionTiles, blocks: int, out_shape: list[jax.ShapeDtypeStruct]
    ):
        return triton.kernel_call(
            functools.partial(kernel, problem=problem, tiles=tiles),
            operands,
            name=f"pallas_attn_flash_attention_{name}",
            grid=(blocks, problem.num_kv_heads, problem.batch),
            out_shape=out_shape,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            lowering=lowering,
        )

    tiles = config.query
    blocks = problem.group * problem.blocks("query", tiles.block_q)
    (d_query,) = call(_query_kernel, "dq", tiles, blocks, [query])
    tiles = config.key_value
    blocks = problem.blocks("key", tiles.block_kv)
    d_key, d_value = call(_key_value_kernel, "dkv", tiles, blocks, [key, value])
    return d_query, d_key, d_value


class QueryRows(NamedTuple):
    """What gradients need for some queries of one head."""

    query: list[jax.Array]
    d_out: list[jax.Array]
    lse: softmax.Lse
    delta: jax.Array


def rows_of(refs: BackwardOperands, problem: Problem, cell: scores.Cell, tokens, real) -> QueryRows:
    stream = dense.Stream(problem.rules.layout, cell.batch, (cell.kv_head, cell.place))
    maximum, rest, delta = (
        triton.load(dense.per_token(ref, cell, tokens), mask=real, other=0.0)
        for ref in (refs.maximum, refs.rest, refs.delta)
    )
    return QueryRows(
        stream.read(refs.query, tokens, real, problem.query_chunks),
        stream.read(refs.d_out, tokens, real, problem.value_chunks),
        softmax.Lse(maximum, rest),
        delta,
    )


def pairs_of(
    given: weights.Bent, rows: QueryRows, by_row: Any, d_weights, seen: jax.Array | None
) -> weights.Pairs:
    """`by_row`: an index that makes per-row numbers broadcast along keys."""
    lse = softmax.Lse(*(part[by_row] for part in rows.lse))
    return weights.pairs(given, lse, rows.delta[by_row], d_weights, seen)


def _query_kernel(refs: BackwardOperands, d_query_ref, *, problem: Problem, tiles: FlashAttentionTiles):
    rules = problem.rules
    queries, keys = sides(refs, problem, tiles)
    cell, index = of_program(problem, problem.blocks("query", tiles.block_q), 1)
    mine = walk.looked_up(walk.block(queries, cell.batch, index), queries, keys, cell)
    pool = dense.Stream(rules.layout, cell.batch, (cell.kv_head,))
    rows = rows_of(refs, problem, cell, mine.tokens, mine.real)
    of_mods = mods.over_refs(refs.mods, refs.captured, cell, of_score=slope)
    of_mods = of_mods.at(QUERY, mine.tokens, problem.q_len)
    rounds = low_bits.are_lost(refs.key.dtype)

    def step(state: tuple[Any, jax.Array], tile: walk.Tile) -> tuple[Any, jax.Array]:
        sums, counted = state
        k = pool.read(refs.key, tile.tokens, tile.held, problem.query_chunks)
        v = pool.read(refs.value, tile.tokens, tile.held, problem.value_chunks)
        query_at, key_at = mine.tokens[:, None], tile.tokens[None, :]
        real = mine.real[:, None] & tile.held[None, :]
        here = of_mods.at(KEY, tile.tokens, problem.kv_len, masked=tile.masked)
        products = logits.products(rows.query, k, None)
        given = scores.scores(refs, cell, products, query_at, key_at, real, here)
        seen = scores.visible(rules.band, query_at, key_at, tile.masked, [tile.held[None, :]], here)
        d_weights = logits.products(rows.d_out, v, None)
        pairs = pairs_of(given, rows, np.s_[:, None], d_weights, seen)
        d_products = pairs.d_products.astype(refs.key.dtype)
        if rounds:
            counted = counted + weights.counted(pairs, d_products)
        added = tuple(total + triton.dot(d_products, part) for total, part in zip(sums, k, strict=True))
        return added, counted

    def gradient(part: walk.Part) -> None:
        sums = tuple(jnp.zeros((tiles.block_q, size), jnp.float32) for _, size in problem.query_chunks)
        state = sums, jnp.zeros((tiles.block_q, weights.SUMS), jnp.float32)
        sums, counted = walk.walk(mine, part, queries, keys, rules.band, cell, step, state)
        if rounds:
            tokens, held = walk.sample(mine, part, queries, keys, rules.band, cell, SAMPLE)
            some = pool.read(refs.key, tokens, held, problem.query_chunks)
            place = dense.per_token(refs.total, cell, mine.tokens)
            excess = weights.excess(counted, triton.load(place, mask=mine.real, other=0.0))
            number = jnp.sum(held.astype(jnp.int32))
            sums = [weights.settled(x, excess, k, number) for x, k in zip(sums, some, strict=True)]
        stream = dense.Stream(rules.layout, cell.batch, (cell.kv_head, cell.place))
        scaled = [total * rules.scale for total in sums]
        stream.write(d_query_ref, mine.tokens, part.tokens, problem.query_chunks, scaled)

    walk.parts(mine, gradient)


def _key_value_kernel(
    refs: BackwardOperands, d_key_ref, d_value_ref, *, problem: Problem, tiles: FlashAttentionTiles
):
    """Tiles are [keys, queries], so that weights and gradients of logits enter the products with queries straight from
    registers.

    The first keys come first: most causal queries see them.
    """
    rules = problem.rules
    queries, keys = sides(refs, problem, tiles)
    index, kv_head, batch = (triton.program_id(axis) for axis in range(3))
    mine = walk.block(keys, batch, index)
    if problem.group == 1:
        mine = walk.looked_up(mine, keys, queries, scores.Cell(batch, kv_head, jnp.int32(0)))
    pool = dense.Stream(rules.layout, batch, (kv_head,))
    k = pool.read(refs.key, mine.tokens, mine.real, problem.query_chunks)
    v = pool.read(refs.value, mine.tokens, mine.real, problem.value_chunks)

    def step(
        cell: scores.Cell, of_mods: mods.Tile, sums: tuple[Any, Any], tile: walk.Tile
    ) -> tuple[Any, Any]:
        rows = rows_of(refs, problem, cell, tile.tokens, tile.held)
        query_at, key_at = tile.tokens[None, :], mine.tokens[:, None]
        real = mine.real[:, None] & tile.held[None, :]
        here = of_mods.at(QUERY, tile.tokens, problem.q_len, masked=tile.masked)
        products = logits.products(k, rows.query, None)
        given = scores.scores(refs, cell, products, query_at, key_at, real, here)
        seen = scores.visible(rules.band, query_at, key_at, tile.masked, [tile.held[None, :]], here)
        d_weights = logits.products(v, rows.d_out, None)
        pairs = pairs_of(given, rows, np.s_[None, :], d_weights, seen)
        shares, d_products = (x.astype(refs.query.dtype) for x in (pairs.weights, pairs.d_products))
        d_key, d_value = sums

        def added(totals: list[jax.Array], pairs: jax.Array, parts: list[jax.Array]) -> list[jax.Array]:
            return [sums + triton.dot(pairs, part) for sums, part in zip(totals, parts, strict=True)]

        return added(d_key, d_products, rows.query), added(d_value, shares, rows.d_out)

    def of_score(score: Program) -> Program:
        # Elsewhere a thread's pairs share distances. Here each has its own, and registers are few.
        return in_floats(slope(score), ((QUERY, problem.q_len), (KEY, problem.kv_len)))

    def head(part: walk.Part, place: jax.Array, sums: tuple[Any, Any]) -> tuple[Any, Any]:
        cell = scores.Cell(batch, kv_head, place)
        transposed = rules.band.transposed()
        of_mods = mods.over_refs(refs.mods, refs.captured, cell, of_score=of_score, queries_first=False)
        of_mods = of_mods.at(KEY, mine.tokens, problem.kv_len)
        own = mine if mine.listed is not None else walk.looked_up(mine, keys, queries, cell)
        return walk.walk(
            own, part, keys, queries, transposed, cell, functools.partial(step, cell, of_mods), sums
        )

    def zeros(chunks: Sequence[Chunk]) -> list[jax.Array]:
        return [jnp.zeros((tiles.block_kv, size), jnp.float32) for _, size in chunks]

    def gradients(part: walk.Part) -> None:
        sums = zeros(problem.query_chunks), zeros(problem.value_chunks)
        heads = functools.partial(head, part)
        # No loop for a single head: Triton pipelines innermost loops only.
        sums = (
            heads(jnp.int32(0), sums) if problem.group == 1 else lax.fori_loop(0, problem.group, heads, sums)
        )
        d_key = [total * rules.scale for total in sums[0]]
        pool.write(d_key_ref, mine.tokens, part.tokens, problem.query_chunks, d_key)
        pool.write(d_value_ref, mine.tokens, part.tokens, problem.value_chunks, sums[1])

    walk.parts(mine, gradients)


@functools.partial(jax.jit, static_argnames=("dtype", "config", "lowering"))
def bias_gradient(
    operands: BackwardOperands,
    *,
    dtype: Any,
    config: FlashAttentionConfig,
    lowering: triton.Lowering = "pallas",
) -> jax.Array:
    """Gradient of the bias, of its shape: [batch or 1, num_kv_heads or 1, group or 1, q_len or 1, kv_len]."""
    assert operands.bias is not None
    problem, shape = Problem.of(operands), operands.bias.shape
    itemsize, device = operands.query.dtype.itemsize, current_device()
    # The loop loads both sides: both take buffers.
    tiles = fitted(config.key_value, "bias", problem, itemsize, operands.pair_bytes, device)
    q_blocks = problem.blocks("query", tiles.block_q) if shape[3] > 1 else 1
    (d_bias,) = triton.kernel_call(
        functools.partial(_bias_kernel, problem=problem, tiles=tiles, q_blocks=q_blocks, shape=shape),
        operands,
        name="pallas_attn_flash_attention_dbias",
        grid=(problem.blocks("key", tiles.block_kv) * q_blocks, shape[1] * shape[2], shape[0]),
        out_shape=[jax.ShapeDtypeStruct(shape, dtype)],
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        lowering=lowering,
    )
    return d_bias


def _bias_kernel(
    refs: BackwardOperands, d_bias_ref, *, problem: Problem, tiles: FlashAttentionTiles, q_blocks: int,
    shape: tuple[int, ...],
):  # fmt: skip
    """A program sums one tile over everything that shares the bias. Documents need no walk of their own here: no
    product sums over tokens, so a token's NaN does not spread."""
    rules = problem.rules
    queries, keys = sides(refs, problem, tiles)
    flat, heads, batch = (triton.program_id(axis) for axis in range(3))
    fixed = (batch, heads // shape[2], heads % shape[2], flat % q_blocks)
    block_kv = flat // q_blocks
    sizes = (problem.batch, problem.num_kv_heads, problem.group, problem.blocks("query", tiles.block_q))
    summed = [size if own == 1 else 1 for own, size in zip((*shape[:3], q_blocks), sizes, strict=True)]

    def one(i: jax.Array, total: jax.Array) -> jax.Array:
        place = []
        for own, count in reversed(list(zip(fixed, summed, strict=True))):
            place.append(own if count == 1 else i % np.int32(count))
            i = i // np.int32(count)
        block_q, *head = place
        cell = scores.Cell(*reversed(head))
        asked, given = walk.block(queries, cell.batch, block_q), walk.block(keys, cell.batch, block_kv)
        rows = rows_of(refs, problem, cell, asked.tokens, asked.real)
        pool = dense.Stream(rules.layout, cell.batch, (cell.kv_head,))
        k = pool.read(refs.key, given.tokens, given.real, problem.query_chunks)
        v = pool.read(refs.value, given.tokens, given.real, problem.value_chunks)
        query_at, key_at = asked.tokens[:, None], given.tokens[None, :]
        real = asked.real[:, None] & given.real[None, :]
        products = logits.products(rows.query, k, None)
        here = mods.over_refs(refs.mods, refs.captured, cell, of_score=slope)
        here = here.at(QUERY, asked.tokens, problem.q_len).at(KEY, given.tokens, problem.kv_len)
        shaped = scores.scores(refs, cell, products, query_at, key_at, real, here)
        among = [real]
        if asked.rank is not None and given.rank is not None:
            among.append(asked.rank[:, None] == given.rank[None, :])
        seen = scores.visible(rules.band, query_at, key_at, True, among, here)
        d_weights = logits.products(rows.d_out, v, None)
        pairs = pairs_of(shaped, rows, np.s_[:, None], d_weights, seen)
        return total + pairs.d_logits

    zeros = jnp.zeros((tiles.block_q, tiles.block_kv), jnp.float32)
    total = lax.fori_loop(0, math.prod(summed), one, zeros)
    asked, given = walk.block(queries, batch, fixed[3]), walk.block(keys, batch, block_kv)
    cell = scores.Cell(*fixed[:3])
    if shape[3] == 1:
        total, first = jnp.sum(total, axis=0), jnp.zeros_like(given.tokens)
        place = scores.pairs_at(d_bias_ref, cell, first, given.tokens)
        triton.store(place, total.astype(d_bias_ref.dtype), mask=given.real)
    else:
        place = scores.pairs_at(d_bias_ref, cell, asked.tokens[:, None], given.tokens[None, :])
        mask = asked.real[:, None] & given.real[None, :]
        triton.store(place, total.astype(d_bias_ref.dtype), mask=mask)
