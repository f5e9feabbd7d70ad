"""`write_latents` in plain jnp: a scatter of rows that drops the slots it must skip."""

import jax
import jax.numpy as jnp

from pallas_attn._tile.latents import BYTES
from pallas_attn.ops.latent_cache.format import quantized
from pallas_attn.ops.latent_cache.operands import Operands


def write_latents_xla(operands: Operands) -> tuple[jax.Array]:
    is_bytes = operands.latent_cache.dtype == BYTES
    new = quantized(operands.latents, operands.scales) if is_bytes else operands.latents
    return (write_rows(new, operands.latent_cache, operands.slot_mapping),)


def write_rows(new: jax.Array, pool: jax.Array, slot_mapping: jax.Array) -> jax.Array:
    """Tokens [num_tokens, width] into their slots of a pool [num_pages, page_size, 1, width], in its dtype."""
    rows = pool.reshape(-1, pool.shape[-1])
    # Negative indices count from the end in jnp: skipped tokens go past the end instead, where they are dropped.
    slots = jnp.where(slot_mapping < 0, rows.shape[0], slot_mapping)
    return rows.at[slots].set(new.astype(rows.dtype), mode="drop").reshape(pool.shape)
