"""MLA decode on Hopper: the CUDA kernel of csrc/mla, called through XLA's FFI."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call import ffi
from pallas_attn._tile.layout import PoolShape

LATENT_DIM = 512
PAGE_SIZE = 64


def unsupported(dtype: Any, pool: PoolShape) -> str | None:
    """The reason the CUDA kernel cannot serve queries and caches of a dtype and pool, or None."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs bfloat16 or float16, got {jnp.dtype(dtype).name}"
    if pool.page_size != PAGE_SIZE:
        return f"needs pages of {PAGE_SIZE} tokens, got {pool.page_size}"
    return None


def mla_decode_cuda(
    query: jax.Array,
    latent_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    schedule_metadata: jax.Array,
    num_splits: jax.Array,
    *,
    scale: float,
    causal: bool,
) -> tuple[jax.Array, jax.Array]:
    """Attention of `query` over the latent cache, by the pages of `block_tables`.

    Args:
        query: [num_seqs, q_len, num_heads, 576] bfloat16 or float16.
        latent_cache: [num_pages, 64, num_kv_heads, 576], same dtype; num_heads is a multiple of num_kv_heads.
        block_tables: [num_seqs, max_blocks] int32.
        seq_lens: [num_seqs] int32, the new tokens included.
        schedule_metadata, num_splits: of `mla_schedule`, for these lengths.
        scale: multiplies the scores; positive.
        causal: query i of q_len sees seq_len - q_len + i + 1 tokens instead of all.

    Returns:
        out [num_seqs, q_len, num_heads, 512] in the query's dtype and lse [num_seqs, num_heads, q_len] float32,
        natural logarithm; 0 and -inf where nothing is visible, NaN for a request that uses a page outside the
        pool, or whose length is negative or beyond its row of the table.

    vmap calls it once for each of the batch, one after the other. Under a mesh, call it inside shard_map.
    """
    ffi.register()
    num_seqs, q_len, num_heads, query_dim = query.shape
    num_kv_heads = latent_cache.shape[2]
    group = num_heads // num_kv_heads
    pieces = num_seqs + schedule_metadata.shape[0]
    call = jax.ffi.ffi_call(
        "pallas_attn_mla_decode_sm90",
        (
            jax.ShapeDtypeStruct((num_seqs, num_kv_heads, q_len, group, LATENT_DIM), query.dtype),
            jax.ShapeDtypeStruct((num_seqs, num_heads, q_len), jnp.float32),
            # Results of requests cut into several splits, before they are merged: outputs, because a handler
            # that allocates cannot be part of a command buffer.
            jax.ShapeDtypeStruct((pieces, q_len * num_heads, LATENT_DIM), jnp.float32),
            jax.ShapeDtypeStruct((pieces, q_len * num_heads), jnp.float32),
        ),
        vmap_method="sequential",
    )
    # The rows of one KV head together. With one KV head, or one token, nothing moves.
    by_kv_head = query.reshape(num_seqs, q_len, num_kv_heads, group, query_dim).swapaxes(1, 2)
    out, lse, _, _ = call(
        by_kv_head,
        latent_cache,
        block_tables,
        seq_lens,
        schedule_metadata,
        num_splits,
        scale=np.float32(scale),
        causal=bool(causal),
    )
    return out.swapaxes(1, 2).reshape(num_seqs, q_len, num_heads, LATENT_DIM), lse


def mla_schedule_cuda(
    seq_lens: jax.Array, num_parts: int, *, overhead_blocks: int = 5
) -> tuple[jax.Array, jax.Array]:
    """The schedule of `mla_schedule` by one small kernel: [num_parts, 8] and [num_seqs + 1] int32.

    Args:
        seq_lens: [num_seqs] int32.
        num_parts: pieces of equal work.
        overhead_blocks: what starting on a request costs, in blocks of 64 tokens. Smaller values cut small
            batches finer.
    """
    ffi.register()
    call = jax.ffi.ffi_call(
        "pallas_attn_mla_schedule_sm90",
        (
            jax.ShapeDtypeStruct((num_parts, 8), jnp.int32),
            jax.ShapeDtypeStruct((seq_lens.shape[0] + 1,), jnp.int32),
        ),
        vmap_method="sequential",
    )
    schedule_metadata, num_splits = call(seq_lens, overhead_blocks=overhead_blocks)
    return schedule_metadata, num_splits
