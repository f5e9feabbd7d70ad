"""MLA decode on Hopper: the CUDA kernel of csrc/mla, called through XLA's FFI."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call import ffi
from pallas_attn._call.pools import PoolShape
from pallas_attn._split.splits import scheduled_places
from pallas_attn._tile.latents import BYTES, LATENT_DIM

PAGE_SIZE = 64


def unsupported(dtype: Any, pool: PoolShape) -> str | None:
    """The reason why the CUDA kernel cannot serve caches of this dtype and pool, or None."""
    if dtype not in (jnp.bfloat16, jnp.float16, BYTES):
        return f"needs bfloat16, float16 or uint8, got {jnp.dtype(dtype).name}"
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
    cooperative: bool | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of `query` over the latent cache, by the pages of `block_tables`.

    Args:
        query: [num_seqs, q_len, num_heads, 576] bfloat16 or float16.
        latent_cache: [num_pages, 64, num_kv_heads, 576], same dtype, or, under bfloat16, [num_pages, 64, num_kv_heads,
            656] uint8, whose latents are used as rounded to float16 relative to the largest scales; num_heads is a
            multiple of num_kv_heads.
        block_tables: [num_seqs, max_blocks] int32.
        seq_lens: [num_seqs] int32, the new tokens included.
        schedule_metadata, num_splits: of `mla_schedule`, for these lengths.
        scale: multiplies the scores; positive.
        causal: query i of q_len sees seq_len - q_len + i + 1 tokens instead of all.
        cooperative: whether the kernel's blocks may wait for each other and merge sequences that were cut by
            themselves, where all of them run at once. That is faster, but such a launch waits until it has the
            device to itself, and so does not overlap with a collective's kernel. None is True, but for
            PALLAS_ATTN_COOPERATIVE=0 in the environment when the call is traced. A device that would not run them
            all at once (MPS, green contexts) is found out by asking it, and served without.

    Returns:
        out [num_seqs, q_len, num_heads, 512] in the query's dtype and lse [num_seqs, q_len, num_heads] float32,
        natural logarithm; 0 and -inf where nothing is visible, NaN for a request that uses a page outside the
        pool, or whose length is negative or beyond its row of the table.

    vmap calls it once for each of the batch, one after the other. It knows nothing of a mesh: `mla_decode` does.
    """
    ffi.register()
    num_seqs, q_len, num_heads, query_dim = query.shape
    num_kv_heads = latent_cache.shape[2]
    group = num_heads // num_kv_heads
    places = scheduled_places(schedule_metadata.shape[0])
    call = jax.ffi.ffi_call(
        "pallas_attn_mla_decode_sm90",
        (
            jax.ShapeDtypeStruct((num_seqs, num_kv_heads, q_len, group, LATENT_DIM), query.dtype),
            jax.ShapeDtypeStruct((num_seqs, q_len, num_heads), jnp.float32),
            # Results of the splits, before they are merged: outputs, because a handler that allocates cannot be part of
            # a command buffer.
            jax.ShapeDtypeStruct((places, q_len * num_heads, LATENT_DIM), jnp.float32),
            jax.ShapeDtypeStruct((places, q_len * num_heads, 2), jnp.float32),
        ),
        vmap_method="sequential",
    )
    # Groups the rows of each KV head. With one KV head, or one token, nothing moves.
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
        cooperative=ffi.cooperates("mla_decode") if cooperative is None else bool(cooperative),
    )
    return out.swapaxes(1, 2).reshape(num_seqs, q_len, num_heads, LATENT_DIM), lse
