"""`write_latents` in plain jnp: a scatter of rows that drops the slots it must skip."""

import jax
import jax.numpy as jnp

from pallas_attn._tile.latents import BYTES, Scales, quantized


def write_latents_xla(latents, latent_cache, slot_mapping, *, scales: Scales) -> jax.Array:
    rows = latent_cache.reshape(-1, latent_cache.shape[-1])
    # Negative indices count from the end in jnp: skipped tokens go beyond it instead, where they are dropped.
    slots = jnp.where(slot_mapping < 0, rows.shape[0], slot_mapping)
    new = quantized(latents, scales) if rows.dtype == BYTES else latents.astype(rows.dtype)
    return rows.at[slots].set(new, mode="drop").reshape(latent_cache.shape)
