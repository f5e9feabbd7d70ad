"""Packed documents: tokens with the same segment id attend to each other, and to nothing else.

Kernels visit a block's documents one after the other, so that what another document holds, were it NaN, never meets a
product: 0 * NaN is NaN. For that ids become ranks, 0, 1, 2, ... in order of the ids, and a table says of each rank
where its tokens lie. Documents that lie in one piece and in order of their ids, as packing leaves them, cost few tiles
twice; any other order is right too.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn._tile import triton


class Side(NamedTuple):
    """Of the queries, or of the keys."""

    rank: jax.Array
    """[batch, tokens] int32."""
    table: jax.Array
    """[batch, ranks, 3] int32: first token of the rank, one behind its last, and whether all between are of it."""


class Span(NamedTuple):
    """Where a document's tokens are."""

    first: jax.Array
    end: jax.Array
    solid: jax.Array


def sides(query_ids: jax.Array, key_ids: jax.Array) -> tuple[Side, Side]:
    """From ids [batch, tokens] of queries and keys, any int32."""
    ids = jnp.concatenate([query_ids, key_ids], axis=1)
    order = jnp.argsort(ids, axis=1)
    ordered = jnp.take_along_axis(ids, order, axis=1)
    steps = jnp.cumsum(ordered[:, 1:] != ordered[:, :-1], axis=1, dtype=jnp.int32)
    steps = jnp.pad(steps, ((0, 0), (1, 0)))
    ranks = jax.vmap(lambda order, steps: jnp.zeros_like(steps).at[order].set(steps))(order, steps)
    of_queries, of_keys = ranks[:, : query_ids.shape[1]], ranks[:, query_ids.shape[1] :]
    most = ids.shape[1]
    return Side(of_queries, _table(of_queries, most)), Side(of_keys, _table(of_keys, most))


def _table(ranks: jax.Array, most: int) -> jax.Array:
    tokens = ranks.shape[1]
    at = jnp.arange(tokens, dtype=jnp.int32)

    def one(rank: jax.Array) -> jax.Array:
        first = jnp.full(most, tokens, jnp.int32).at[rank].min(at)
        end = jnp.zeros(most, jnp.int32).at[rank].max(at + 1)
        count = jnp.zeros(most, jnp.int32).at[rank].add(1)
        return jnp.stack([first, end, (end - first == count).astype(jnp.int32)], axis=-1)

    return jax.vmap(one)(ranks)


def span(table_ref: Any, batch: jax.Array, rank: jax.Array) -> Span:
    first, end, solid = (triton.load(table_ref.at[batch, rank, jnp.int32(i)]) for i in range(3))
    return Span(first, end, solid > 0)
