"""`write_latents` in plain jnp: a scatter of rows that drops the slots it must skip."""

import jax
import jax.numpy as jnp

from pallas_attn._tile.latents import BYTES, Scales, quantized


def write_latents_xla(latents, latent_cache, slot_mapping, *, scales: Scales) -> jax.Array:
    new = quantized(latents, scales) if latent_cache.dtype == BYTES else latents
    return write_rows(new, latent_cache, slot_mapping)


def write_rows(new: jax.Array, pool: jax.Array, slot_mapping: jax.Array) -> jax.Array:
    """Tokens [num_tokens, width] into their slots of a pool [num_pages, page_size, 1, width], in its dtype."""
    rows = pool.reshape(-1, pool.shape[-1])
    # Negative indices count from the end in jnp: skipped tokens go beyond it instead, where they are dropped.
    slots = jnp.where(slot_mapping < 0, rows.shape[0], slot_mapping)
    return rows.at[slots].set(new.astype(rows.dtype), mode="drop").reshape(pool.shape)
