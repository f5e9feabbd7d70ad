"""The CUDA kernel of csrc/attention/sm90/backward, called through XLA's FFI."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call import ffi
from pallas_attn._call.hopper_forward import Sequences

TARGET = "pallas_attn_attention_backward_sm90"
BLOCK_Q, BLOCK_KV = 64, 128
DIMS = (64, 96, 128)
"""Widths of heads that the kernel works with; others are filled up."""
COUNT_COLUMNS = 8
"""Of a row of sums, behind a query's gradient: what was multiplied with keys."""
HEADS_TOGETHER = 16
"""KV heads whose key tiles are interleaved. Tiles of one head wait for each other, so few of them should start
together: of 1, 2, 4, 7 and 16 this was the fastest at 2k, 4k and 16k causal tokens (H200)."""


def unsupported(head_dim: int, value_dim: int) -> str | None:
    """The reason the kernel cannot serve what the forward kernel can, or None."""
    if max(head_dim, value_dim) > DIMS[-1]:
        return f"has gradients of heads of at most {DIMS[-1]}, got {max(head_dim, value_dim)}"
    return None


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
            they are in the order in which tiles happen to finish: faster, and the last bits vary from run to run.

    vmap calls it once for each entry of the batch, sequentially.
    """
    ffi.register()
    batch, head_dim = query.shape[0], query.shape[-1]
    tokens, heads = (query.shape[2], query.shape[1]) if heads_first else query.shape[1:3]
    kv_tokens, kv_heads = (key.shape[2], key.shape[1]) if heads_first else key.shape[1:3]
    width = next(dim for dim in DIMS if max(head_dim, value.shape[-1]) <= dim)
    documents = sequences.q_table is not None
    seqs = sequences.q_table.shape[1] if sequences.q_table is not None else 1
    # In each batch entry: whole tiles, and one partial tile of each document.
    max_turns = batch * (tokens // BLOCK_Q + (min(seqs, tokens) if documents else 1))
    max_tiles = batch * (kv_tokens // BLOCK_KV + (min(seqs, kv_tokens) if documents else 1))
    call = jax.ffi.ffi_call(
        TARGET,
        (
            *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (query, key, value)),
            # Scratch: outputs, because a handler that allocates cannot be part of a command buffer.
            jax.ShapeDtypeStruct((2,), jnp.int32),
            jax.ShapeDtypeStruct((max_tiles, 4), jnp.int32),
            jax.ShapeDtypeStruct((max_turns, heads), jnp.int32),
            jax.ShapeDtypeStruct((batch, heads, tokens, width + COUNT_COLUMNS), jnp.float32),
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
