"""The CUDA kernel of csrc/attention/sm90/backward, called through XLA's FFI."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call import ffi
from pallas_attn._call.hopper_forward import Sequences

TARGET = "pallas_attn_attention_backward_sm90"
DIMS = (64, 96, 128)
"""Widths of heads whose gradients are made in one pass; others are filled up. Wider ones, up to the widest of the
forward kernel, take three."""
BLOCK_KV = 128
"""Keys of a tile, and queries where there are three passes."""
COUNT_COLUMNS = 8
"""Of a row of sums, behind a query's gradient: what was multiplied with keys."""
MOST_PASSES = 3
HEADS_TOGETHER = 16
"""KV heads whose key tiles are interleaved. Tiles of one head wait for each other, so few of them should start
together: of 1, 2, 4, 7 and 16 this was the fastest at 2k, 4k and 16k causal tokens (H200)."""


def backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    d_out: jax.Array,
    rows: tuple[jax.Array, ...],
    sequences: Sequences,
    *,
    scale: float,
    left: int | None = None,
    right: int | None = None,
    offset: int = 0,
    softcap: float | None = None,
    heads_first: bool = False,
    ordered: bool = True,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of query, key and value.

    Args:
        query, d_out: [batch, tokens, heads, dim], or heads before tokens; key, value: likewise.
        rows: maximum, rest, delta, total [batch, heads, tokens], as the tiled kernels take them.
        sequences: documents, or none: then each batch entry is one sequence.
        left, right, offset: query i sees keys from i + offset - left to i + offset + right; None is no bound.
        ordered: gradients of queries are added up in one order, so that the same inputs give the same bits. Without,
            they are in the order in which tiles happen to finish: the last bits vary from run to run. Heads that take
            three passes add nothing in memory: their bits are the same either way.

    vmap calls it once for each entry of the batch, sequentially.
    """
    ffi.register()
    batch, head_dim = query.shape[0], query.shape[-1]
    tokens, heads = (query.shape[2], query.shape[1]) if heads_first else query.shape[1:3]
    kv_tokens, kv_heads = (key.shape[2], key.shape[1]) if heads_first else key.shape[1:3]
    widest = max(head_dim, value.shape[-1])
    width = next((dim for dim in DIMS if widest <= dim), None)
    documents = sequences.q_table is not None

    def tiles(tokens: int) -> jax.ShapeDtypeStruct:
        # Where there are documents, a tile may have a single token of its own.
        most = tokens if documents else -(-tokens // BLOCK_KV)
        return jax.ShapeDtypeStruct((batch * most, 4), jnp.int32)

    call = jax.ffi.ffi_call(
        TARGET,
        (
            *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (query, key, value)),
            # Scratch: outputs, because a handler that allocates cannot be part of a command buffer.
            jax.ShapeDtypeStruct((MOST_PASSES, 2), jnp.int32),
            tiles(kv_tokens),
            tiles(0 if width else tokens),
            jax.ShapeDtypeStruct((batch, tokens if width else 0, heads), jnp.int32),
            jax.ShapeDtypeStruct((batch, heads, tokens, width + COUNT_COLUMNS if width else 0), jnp.float32),
        ),
        vmap_method="sequential",
    )
    nothing = jnp.zeros(0, jnp.int32)

    def or_nothing(array: jax.Array | None) -> jax.Array:
        return nothing if array is None else array

    def bound(tokens: int | None) -> np.int64:
        return np.int64(-1 if tokens is None else min(tokens, 2**30))

    d_query, d_key, d_value, *_ = call(
        query,
        key,
        value,
        d_out,
        *rows,
        or_nothing(sequences.q_table),
        or_nothing(sequences.k_table),
        or_nothing(sequences.q_ranks),
        or_nothing(sequences.k_ranks),
        or_nothing(sequences.num_seqs),
        heads_first=heads_first,
        ordered=ordered,
        left=bound(left),
        right=bound(right),
        offset=np.int64(offset),
        heads_together=np.int64(min(kv_heads, HEADS_TOGETHER)),
        scale=np.float32(scale),
        softcap=np.float32(softcap or 0.0),
    )
    return d_query, d_key, d_value
