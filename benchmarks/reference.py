"""What every figure is checked against: attention in float32, one sequence after the other, all of them.

Written apart from the library, whose own plain jnp is one of the implementations measured. Products are exact in
float32 (no TF32); a sequence's pages are gathered and attended to densely.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from costs import MLA_DIM

TOKENS_AT_ONCE = 16
# XLA would try all its kernels for each product, which takes longer than all else that run.py does for a case.
IN_A_HURRY = {"xla_gpu_autotune_level": 0}
PAGES_FIRST, HEADS_FIRST = "pages first", "heads first"


def compiled(right: Callable[..., Any], *shapes: Any) -> Callable[..., Any]:
    """A reference for inputs of these shapes, which runs a few times only."""
    return jax.jit(right).lower(*shapes).compile(compiler_options=IN_A_HURRY)


def expected(
    query: jax.Array,
    caches: tuple[jax.Array, ...],
    table: jax.Array,
    lengths: jax.Array,
    *,
    case: Any,
    value_dim: int,
    cache_scale: float = 1.0,
    order: str = PAGES_FIRST,
) -> jax.Array:
    """float32 [num_seqs, q_len, num_heads, value_dim].

    query: [num_seqs, q_len, num_heads, head_dim].
    caches: keys and values, or one pool whose rows begin with the values; [num_pages, page_size, num_kv_heads, dim].
    cache_scale: what a number stands for in an 8-bit cache.
    order: HEADS_FIRST takes the same memory for [num_kv_heads, num_pages, page_size, dim].
    """
    keys, values = (caches[0], caches[-1])

    def one(operands):
        query, pages, length = operands
        rows = [_rows(pool, pages, order) * cache_scale for pool in (keys, values)]
        return _attend(case, query.astype(jnp.float32), rows[0], rows[1][..., :value_dim], length)

    return jax.lax.map(one, (query, table, lengths))


QUERIES = 256  # that are attended from at once, where there are many


def ragged_expected(
    query: jax.Array, caches: tuple[jax.Array, ...], table: jax.Array, *, case: Any, cache_scale: float = 1.0
) -> jax.Array:
    """float32 [num_tokens, num_heads, value_dim], of `case.q_lens` queries of each sequence end to end."""
    outs, seq, first = [], 0, 0
    sizes = zip(case.seq_lens, case.q_lens, strict=True)
    # Neighbours of one size are compiled once.
    for (length, q_len), alike in itertools.groupby(sizes):
        count, size = len(list(alike)), min(q_len, QUERIES)
        padding = -q_len % size
        queries = query[first : first + count * q_len].reshape(count, q_len, *query.shape[1:])
        queries = jnp.pad(queries, ((0, 0), (0, padding), (0, 0), (0, 0)))

        def one(operands, length=length, q_len=q_len, size=size):
            queries, pages = operands
            keys, values = (_rows(pool, pages, PAGES_FIRST)[:length] * cache_scale for pool in caches)

            def some(operands):
                queries, index = operands
                position = length - q_len + index * size + jnp.arange(size)
                return _attend_at(case, queries.astype(jnp.float32), keys, values, position)

            blocks = queries.reshape(-1, size, *queries.shape[1:])
            rows = jax.lax.map(some, (blocks, jnp.arange(len(blocks))))
            return rows.reshape(len(queries), query.shape[1], -1)[:q_len]

        tables = table[seq : seq + count, : -(-length // case.page_size)]
        outs.append(jax.lax.map(one, (queries, tables)).reshape(count * q_len, query.shape[1], -1))
        seq, first = seq + count, first + count * q_len
    return jnp.concatenate(outs)


def _attend_at(
    case: Any, query: jax.Array, keys: jax.Array, values: jax.Array, position: jax.Array
) -> jax.Array:
    """[queries, num_heads, value_dim] of queries at `position` [queries]."""
    product = functools.partial(jnp.einsum, precision="highest")
    grouped = query.reshape(len(query), keys.shape[1], -1, query.shape[2]) * query.shape[2] ** -0.5
    key_at, at = jnp.arange(len(keys)), position[:, None]
    seen = (key_at <= at) if case.causal else jnp.ones((len(query), len(keys)), bool)
    if case.sliding_window:
        seen &= at - key_at < case.sliding_window
    weights = jax.nn.softmax(jnp.where(seen, product("qhgd,thd->hgqt", grouped, keys), -jnp.inf), axis=-1)
    return product("hgqt,thv->qhgv", weights, values).reshape(*query.shape[:2], -1)


def sparse(
    query: jax.Array, caches: tuple[jax.Array], slots: jax.Array, *, value_dim: int, scale: float
) -> jax.Array:
    """float32 [num_seqs, q_len, num_heads, value_dim] of query tokens that see the slots that they name alone.

    query: [num_seqs, q_len, num_heads, head_dim].
    slots: [num_seqs, q_len, topk], page * page_size + offset; -1 is none.
    """
    (pool,) = caches
    tokens = pool.reshape(-1, pool.shape[-1])

    def one(operands):
        query, slots = operands
        keys = numbers(tokens[slots])
        logits = jnp.einsum("hd,td->ht", query.astype(jnp.float32) * scale, keys, precision="highest")
        weights = jax.nn.softmax(jnp.where(slots >= 0, logits, -jnp.inf), axis=-1)
        return jnp.einsum("ht,tv->hv", weights, keys[:, :value_dim], precision="highest")

    flat = (query.reshape(-1, *query.shape[2:]), slots.reshape(-1, slots.shape[-1]))
    out = jax.lax.map(one, flat, batch_size=min(TOKENS_AT_ONCE, len(flat[0])))
    return out.reshape(*query.shape[:-1], value_dim)


def numbers(rows: jax.Array) -> jax.Array:
    """float32; of an MLA token's 656 bytes the 576 numbers as kernels have them, in bf16."""
    if rows.dtype != jnp.uint8:
        return rows.astype(jnp.float32)

    def read(first: int, end: int, dtype: Any) -> jax.Array:
        size = jnp.dtype(dtype).itemsize
        part = rows[..., first:end].reshape(*rows.shape[:-1], -1, *([size] if size > 1 else []))
        return jax.lax.bitcast_convert_type(part, dtype).astype(jnp.float32)

    latent, scales, rope = (
        read(0, 512, jnp.float8_e4m3fn),
        read(512, 528, jnp.float32),
        read(528, 656, jnp.bfloat16),
    )
    latent = (latent * jnp.repeat(scales, 128, axis=-1)).astype(jnp.bfloat16).astype(jnp.float32)
    return jnp.concatenate([latent, rope], axis=-1)


def _rows(pool: jax.Array, pages: jax.Array, order: str) -> jax.Array:
    """[tokens, num_kv_heads, dim], float32."""
    num_pages, page_size, heads, dim = pool.shape
    if order == HEADS_FIRST:
        gathered = jnp.moveaxis(pool.reshape(heads, num_pages, page_size, dim)[:, pages], 0, 2)
    else:
        gathered = pool[pages]
    return numbers(gathered).reshape(-1, heads, MLA_DIM if pool.dtype == jnp.uint8 else dim)


def _attend(case: Any, query: jax.Array, keys: jax.Array, values: jax.Array, length: jax.Array) -> jax.Array:
    """[q_len, num_heads, value_dim] of one sequence."""
    q_len, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    product = functools.partial(jnp.einsum, precision="highest")
    grouped = query.reshape(q_len, num_kv_heads, -1, head_dim) * head_dim**-0.5
    logits = product("qhgd,thd->hgqt", grouped, keys).reshape(num_heads, q_len, -1)
    logits = jnp.where(_seen(case, length, logits.shape), logits, -jnp.inf)
    weights = jax.nn.softmax(logits, axis=-1).reshape(num_kv_heads, -1, q_len, keys.shape[0])
    return product("hgqt,thv->qhgv", weights, values).reshape(q_len, num_heads, -1)


def _seen(case: Any, length: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Whether a head's query sees a token: broadcasts to `shape`, [num_heads, q_len, tokens]."""
    heads, queries, tokens = (
        jnp.arange(size).reshape([-1 if i == axis else 1 for i in range(3)])
        for axis, size in enumerate(shape)
    )
    positions = length - case.q_len + queries
    seen = tokens <= positions
    if window := getattr(case, "sliding_window", None):
        seen &= tokens > positions - window
    if pattern := getattr(case, "block_sparse", None):
        kv_heads = heads * case.num_kv_heads // case.num_heads
        counts = dict(num_heads=case.num_heads, num_kv_heads=case.num_kv_heads)
        blocks = tokens // pattern.block_size
        local = blocks > (length - 1) // pattern.block_size - pattern.local_blocks
        seen &= local | ((blocks + pattern.offset(heads, kv_heads, **counts)) % pattern.vert_stride == 0)
    return seen


@jax.jit
def _worst(out: jax.Array, right: jax.Array) -> jax.Array:
    difference = jnp.linalg.norm(out.astype(jnp.float32) - right, axis=-1)
    norm = jnp.linalg.norm(right, axis=-1)
    return jnp.max(difference / jnp.where(norm == 0, 1, norm))


def worst_error(outs: Any, rights: Any) -> float:
    """The largest relative error of a row of any of these outputs; NaN where one holds it."""
    errors = [
        _worst(jnp.asarray(out).reshape(right.shape), right) for out, right in zip(outs, rights, strict=True)
    ]
    return float(np.max(np.stack([np.asarray(error) for error in errors])))
