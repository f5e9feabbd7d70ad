"""Block-sparse attention in Pallas, backward: gradients of queries, and of keys and values that lie in rows.

Queries walk over the blocks that their row lists, as in the forward pass. Keys walk over the blocks of queries that see
them, which the transposed layout lists for each head, one head of their group after the other. Every sum is computed by
one program in a fixed order, so the same inputs give the same bits. Sequences of one query are not treated separately.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._call.sizes import next_power_of_2
from pallas_attn._tile import low_bits, masking, rows, softmax, triton, weights
from pallas_attn.ops.blocksparse_attention import walk
from pallas_attn.ops.blocksparse_attention.config import BlockSparseConfig
from pallas_attn.ops.blocksparse_attention.layout import SparseLayout, transposed
from pallas_attn.ops.blocksparse_attention.operands import BackwardOperands, as_prefill
from pallas_attn.ops.blocksparse_attention.problem import Keys, Problem, divided, first_query, read_rows

NONE = np.int32(2**31 - 1)  # no row
SAMPLE = 16  # sampled keys, whose mean estimates the offset that all share


@functools.partial(jax.jit, static_argnames=("config", "lowering"))
def backward(
    operands: BackwardOperands, *, config: BlockSparseConfig, lowering: triton.Lowering = "pallas"
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of query, key and value, for keys in rows."""
    operands = as_prefill(operands)
    query, key, layout, num_heads = operands.query, operands.key, operands.layout, operands.query.shape[1]
    by_query = _tiled(operands, config, config.dq_block_q, config.dq_block_kv)
    by_key = _tiled(operands, config, config.dkv_block_q, config.dkv_block_kv)
    (d_query,) = triton.kernel_call(
        functools.partial(_query_kernel, problem=by_query),
        operands,
        name="pallas_attn_blocksparse_dq",
        grid=(num_heads, walk.num_items(by_query)),
        out_shape=[jax.ShapeDtypeStruct(query.shape, query.dtype)],
        num_warps=config.dq_warps,
        num_stages=config.dq_stages,
        lowering=lowering,
    )
    num_items = key.shape[0] // by_key.config.block_kv + by_key.num_seqs
    d_key, d_value = triton.kernel_call(
        functools.partial(_key_value_kernel, problem=by_key),
        # No program writes tokens that belong to no sequence.
        (jnp.zeros_like(key), jnp.zeros_like(key)),
        dataclasses.replace(operands, layout=transposed(layout)),
        name="pallas_attn_blocksparse_dkv",
        grid=(by_key.pool.num_kv_heads, num_items),
        out_shape=[jax.ShapeDtypeStruct(key.shape, key.dtype)] * 2,
        num_warps=config.dkv_warps,
        num_stages=config.dkv_stages,
        lowering=lowering,
        input_output_aliases={0: 0, 1: 1},
    )
    return d_query, d_key, d_value


def _tiled(operands: BackwardOperands, config: BlockSparseConfig, block_q: int, block_kv: int) -> Problem:
    block_size, q_block_size = operands.layout.sizes
    sizes = dict(block_q=min(block_q, q_block_size), block_kv=min(block_kv, block_size))
    return Problem.of(operands, dataclasses.replace(config, **sizes))


class Queries(NamedTuple):
    """What gradients need for some queries of one head."""

    query: jax.Array
    d_out: jax.Array
    lse: softmax.Lse
    delta: jax.Array

    @classmethod
    def read(cls, refs: BackwardOperands, problem: Problem, head, token, real) -> "Queries":
        query, d_out = (read_rows(ref, token, head, problem, real) for ref in (refs.query, refs.d_out))
        place = head + 0 * token, token
        maximum, rest, delta = (
            triton.load(ref.at[place], mask=real, other=np.float32(other))
            for ref, other in ((refs.maximum, 0), (refs.rest, np.inf), (refs.delta, 0))
        )
        # Queries that see nothing, and places without a query, get weights of 0.
        lse = softmax.Lse(maximum, jnp.where(rest == -jnp.inf, jnp.inf, rest))
        return cls(query, d_out, lse, delta)

    def pairs(
        self, given: weights.Bent, by_row: Any, d_weights, good, seen: jax.Array | None
    ) -> weights.Pairs:
        """`by_row`: an index that makes per-query numbers broadcast along keys; `good` as in `walk.spoiled`."""
        given = given._replace(scale=walk.spoiled(given.scale, good))
        lse = softmax.Lse(*(part[by_row] for part in self.lse))
        return weights.pairs(given, lse, self.delta[by_row], d_weights, seen)


def _query_kernel(refs: BackwardOperands, d_query_ref, *, problem: Problem):
    head = triton.program_id(0)
    tile = walk.tile_of(problem, refs, walk.num_items(problem) - 1 - triton.program_id(1))
    kv_head = head // problem.group

    @triton.when(tile.any)
    def _():
        mine = Queries.read(refs, problem, head, tile.token, tile.real)
        pool = Keys(problem, refs, tile.seq, tile.k_start, kv_head)

        def read(keys: walk.KeyTile) -> list[jax.Array]:
            where = keys.first, keys.newest, problem.config.block_kv, refs.query.dtype
            return [pool.read_up_to(which, *where)[0] for which in ("key", "value")]

        rounds = low_bits.are_lost(refs.query.dtype)

        def step(
            state: tuple[jax.Array, jax.Array] | None, keys: walk.KeyTile, key_and_value: list[jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            k, v = key_and_value
            given = weights.bent(
                triton.dot(mine.query, k, trans_b=True), problem.scale, problem.rules.softcap
            )
            d_weights = triton.dot(mine.d_out, v, trans_b=True)
            pairs = mine.pairs(given, np.s_[:, None], d_weights, keys.good, keys.seen)
            d_products = pairs.d_products.astype(k.dtype)
            new = triton.dot(d_products, k)
            counted = weights.counted(pairs, d_products) if rounds else jnp.zeros_like(mine.delta)
            if state is None:
                return new, counted
            return state[0] + new, state[1] + counted

        sums = (tile.size, weights.SUMS) if rounds else (tile.size,)
        zeros = jnp.zeros((tile.size, problem.dims[1]), jnp.float32), jnp.zeros(sums, jnp.float32)
        (total, counted), bad = walk.walk(refs.layout, head, tile, problem, walk.Walker(read, step), zeros)
        if rounds:
            position, held = walk.sample(refs.layout, head, tile, SAMPLE)
            some = read_rows(refs.key, tile.k_start + position, kv_head, problem, held)
            place = head + 0 * tile.token, tile.token
            excess = weights.excess(counted, triton.load(refs.total.at[place], mask=tile.real, other=0.0))
            total = weights.settled(total, excess, some, jnp.sum(held.astype(jnp.int32)))
        total = softmax.poison(total * problem.scale, bad)
        _write(d_query_ref, tile.token, head, tile.real, total, problem)


class KeyTile(NamedTuple):
    """Some neighbouring keys of one sequence."""

    seq: jax.Array
    first: jax.Array
    position: jax.Array
    held: jax.Array
    token: jax.Array
    k_len: jax.Array
    before: jax.Array
    """Position of the sequence's first query."""
    q_start: jax.Array


def _key_tile(problem: Problem, refs: BackwardOperands, item: jax.Array) -> KeyTile:
    """The keys of a work item: sequence i has the items from cu_k_lens[i] // block_kv + i on, one for a partial tile
    included."""
    block, num_seqs, tokens = problem.config.block_kv, problem.num_seqs, problem.pool.num_pages
    seqs = jnp.arange(next_power_of_2(num_seqs))
    assert refs.cu_q_lens is not None
    assert refs.cu_k_lens is not None
    ends = triton.load(refs.cu_k_lens.at[jnp.minimum(seqs + 1, num_seqs)], mask=seqs < num_seqs, other=0)
    ends = jnp.clip(ends, 0, tokens)
    seq = jnp.sum(((seqs < num_seqs) & (ends // block + seqs + 1 <= item)).astype(jnp.int32))
    seq = jnp.minimum(seq, num_seqs - 1)
    (q_start, q_end), (k_start, k_end) = (
        [triton.load(ends.at[seq + i]) for i in (np.int32(0), np.int32(1))]
        for ends in (refs.cu_q_lens, refs.cu_k_lens)
    )
    bad = (k_start < 0) | (k_end < k_start) | (k_end > tokens)
    k_len = jnp.where(bad, 0, k_end - k_start)
    q_start = jnp.clip(first_query(seq, q_start), 0, problem.num_tokens)
    q_len = jnp.clip(q_end, q_start, problem.num_tokens) - q_start
    first = (item - (k_start // block + seq)) * block
    position = first + jnp.arange(block)
    held = (position >= 0) & (position < k_len)
    return KeyTile(seq, first, position, held, k_start + position, k_len, k_len - q_len, q_start)


def _key_value_kernel(_, refs: BackwardOperands, d_key_ref, d_value_ref, *, problem: Problem):
    """Tiles are [keys, queries], so that weights and gradients of logits enter the products with queries straight from
    registers.

    The first keys come first: most queries may see them.
    """
    kv_head = triton.program_id(0)
    mine = _key_tile(problem, refs, triton.program_id(1))

    # Keys of a sequence without queries may hold anything; their gradient is 0.
    @triton.when((mine.first >= 0) & (mine.first < mine.k_len) & (mine.before < mine.k_len))
    def _():
        k, v = (read_rows(ref, mine.token, kv_head, problem, mine.held) for ref in (refs.key, refs.value))

        def step(head: jax.Array, sums: Any, queries: "QueryTile") -> Any:
            theirs = Queries.read(refs, problem, head, queries.token, queries.real)
            given = weights.bent(
                triton.dot(k, theirs.query, trans_b=True), problem.scale, problem.rules.softcap
            )
            d_weights = triton.dot(v, theirs.d_out, trans_b=True)
            pairs = theirs.pairs(given, np.s_[None, :], d_weights, queries.good, queries.seen)
            shares, d_products = (x.astype(k.dtype) for x in (pairs.weights, pairs.d_products))
            d_key, d_value = sums
            return d_key + triton.dot(d_products, theirs.query), d_value + triton.dot(shares, theirs.d_out)

        def head(place: jax.Array, sums: Any) -> Any:
            query_head = kv_head * problem.group + place
            return _over_queries(
                refs.layout, query_head, mine, problem, functools.partial(step, query_head), sums
            )

        zeros = jnp.zeros((mine.held.shape[0], problem.dims[1]), jnp.float32)
        sums = zeros, zeros
        # No loop for a single head: Triton pipelines innermost loops only.
        sums = head(jnp.int32(0), sums) if problem.group == 1 else lax.fori_loop(0, problem.group, head, sums)
        # Checked here, where registers are free again.
        unknown = _unknown(refs.layout, kv_head, problem)
        sums = tuple(softmax.poison(total, unknown) for total in sums)
        _write(d_key_ref, mine.token, kv_head, mine.held, sums[0] * problem.scale, problem)
        _write(d_value_ref, mine.token, kv_head, mine.held, sums[1], problem)


def _unknown(seen_by: SparseLayout, kv_head: jax.Array, problem: Problem) -> jax.Array:
    """Whether the row pointers of one of a KV head's query heads are invalid (`transposed`)."""
    group = jnp.arange(next_power_of_2(problem.group))
    head = kv_head * problem.group + group if seen_by.layout_heads > 1 else 0 * group
    first = triton.load(seen_by.row_pointers.at[head, 0 * group], mask=group < problem.group, other=0)
    return jnp.min(first) < 0


class QueryTile(NamedTuple):
    """A tile of the queries that see a block of keys."""

    token: jax.Array
    real: jax.Array
    good: jax.Array | None
    """Always True; None where logits depend on the row otherwise (`walk.spoiled`)."""
    seen: jax.Array | None
    """[keys, queries] which are seen; None: all."""


def _over_queries(seen_by: SparseLayout, head, mine: KeyTile, problem: Problem, step: Any, sums: Any) -> Any:
    """`step` for each tile of queries that see the keys, those that see only some of them first."""
    size, block_q = seen_by.block_size, problem.config.block_q
    tiles = size // block_q
    head = head if seen_by.layout_heads > 1 else 0 * head
    block = divided(mine.first, seen_by.q_block_size)[0]
    inside = block < seen_by.num_row_blocks
    block = jnp.where(inside, block, 0)
    begin, end = (triton.load(seen_by.row_pointers.at[head, block + i]) for i in (np.int32(0), np.int32(1)))
    begin, end = jnp.maximum(begin, 0), jnp.where(inside, end, begin)
    # Rows of queries ascend: those before the keys or the first query come first, those after the last query last.
    entry = begin + jnp.arange(next_power_of_2(seen_by.max_len // size + 1))
    listed = triton.load(seen_by.columns.at[head + 0 * entry, entry], mask=entry < end, other=NONE)

    def below(row: jax.Array) -> jax.Array:
        return begin + jnp.sum((listed < row).astype(jnp.int32))

    last = mine.first + problem.config.block_kv - 1
    start = below(divided(jnp.maximum(mine.first, mine.before), size)[0])
    clear = jnp.maximum(start, below(divided(last, size)[0] + 1))
    stop = jnp.maximum(clear, below(divided(mine.k_len - 1, size)[0] + 1))

    def one(i: jax.Array, sums: Any, *, first: jax.Array, masked: bool) -> Any:
        which, part = divided(i, tiles)
        row = triton.load(seen_by.columns.at[head, first + which])
        position = row * size + part * block_q + jnp.arange(block_q)
        real = (position >= mine.before) & (position < mine.k_len)
        seen = masking.causal(mine.position[:, None], position[None, :]) if masked else None
        token = mine.q_start + position - mine.before
        return step(sums, QueryTile(token, real, None if masked else row >= 0, seen))

    sums = lax.fori_loop(0, (clear - start) * tiles, functools.partial(one, first=start, masked=True), sums)
    return lax.fori_loop(0, (stop - clear) * tiles, functools.partial(one, first=clear, masked=False), sums)


def _write(
    ref: Any, token: jax.Array, head: jax.Array, real: jax.Array, tile: jax.Array, problem: Problem
) -> None:
    place, mask = rows.elements(ref, (token, head + 0 * token), real, problem.dims)
    triton.store(place, tile.astype(ref.dtype), mask=mask)
