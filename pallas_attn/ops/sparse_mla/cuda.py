"""Sparse MLA on Hopper: the CUDA kernels of csrc/mla/sm90/{sparse,transposed}, called through XLA's FFI."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call import ffi
from pallas_attn._call.device import current_device
from pallas_attn._split.splits import scheduled_places
from pallas_attn._tile.latents import LATENT_DIM
from pallas_attn.ops.sparse_mla.dealing import TILE_IDS, Deal, dealt
from pallas_attn.ops.sparse_mla.operands import Operands

TILE_HEADS = 64
MOST_IDS = 2**31 - 1 - 4 * TILE_IDS


def unsupported(dtype: Any, topk: int) -> str | None:
    """The reason the CUDA kernels cannot serve queries of a dtype, or so many ids; or None."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs bfloat16 or float16, got {jnp.dtype(dtype).name}"
    return f"takes at most {MOST_IDS} ids, got {topk}" if topk > MOST_IDS else None


def sparse_mla_cuda(operands: Operands, *, function: str = "sparse_mla_decode") -> tuple[jax.Array, ...]:
    """As `sparse_mla_pallas`, without a config; for `function`, in messages.

    How tokens are split depends on shapes alone, so the schedule is a constant and nothing is computed before the
    kernel; a token with fewer ids than `topk` has shorter splits. With `max_logits` no token is cut.

    Bytes are used as rounded to float16 relative to the largest scales, or with `max_logits` to bf16.

    vmap calls it once for each entry of the batch, sequentially.
    """
    ffi.register()
    query, ids, max_logits = operands.query, operands.ids, operands.max_logits
    num_tokens, num_heads, _ = query.shape
    num_parts = max(1, current_device().num_cores // -(-num_heads // TILE_HEADS))
    deal: Deal = dealt(num_tokens, operands.topk, num_parts, num_heads, whole=max_logits)
    places = scheduled_places(len(deal.parts)) if deal.cuts else 0
    peaks = (num_tokens, num_heads) if max_logits else (0, 0)
    call = jax.ffi.ffi_call(
        "pallas_attn_sparse_mla_sm90",
        (
            jax.ShapeDtypeStruct((num_tokens, num_heads, LATENT_DIM), query.dtype),
            jax.ShapeDtypeStruct((num_tokens, num_heads), jnp.float32),
            jax.ShapeDtypeStruct(peaks, jnp.float32),
            # Splits before they are merged: outputs, because a handler that allocates cannot be part of a command
            # buffer.
            jax.ShapeDtypeStruct((places, num_heads, LATENT_DIM), jnp.float32),
            jax.ShapeDtypeStruct((places, num_heads, 2), jnp.float32),
        ),
        vmap_method="sequential",
    )
    out, lse, maximum, _, _ = call(
        query,
        operands.latent_cache,
        operands.indices,
        operands.topk_length,
        jnp.zeros((1, 1), jnp.int32) if operands.block_tables is None else operands.block_tables,
        jnp.asarray(deal.parts),
        jnp.asarray(deal.num_splits),
        jnp.zeros((0,), jnp.float32) if operands.sinks is None else operands.sinks,
        scale=np.float32(operands.scale),
        page_size=np.int64(ids.page_size or 0),
        skip_all_outside=bool(ids.skip_all_outside),
        cooperative=ffi.cooperates(function),
    )
    return (out, lse, maximum) if max_logits else (out, lse)
