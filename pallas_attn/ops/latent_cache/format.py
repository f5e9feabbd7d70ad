"""Latents of 576 elements to 656 bytes and back, in plain jnp; kernels read the bytes by `_tile/latent_tile.py`."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn._tile.latents import (
    BYTES,
    FP8,
    GROUP,
    LATENT_DIM,
    LEAST_SCALE,
    NUM_GROUPS,
    ROPE_AT,
    SCALES_AT,
    TOKEN_BYTES,
    Scales,
)
from pallas_attn._tile.quantization import largest, quantize, up_to_power_of_2


def group_scale(values: jax.Array, scales: Scales) -> jax.Array:
    """float32 scales [...] of groups [..., 128]: the largest magnitude / 448, or the next power of two.

    NaN for a group with NaN or Inf, so that the group reads back as NaN.
    """
    magnitude = jnp.abs(values)
    # On GPUs a maximum ignores NaN.
    peak = jnp.max(jnp.where(magnitude < jnp.inf, magnitude, jnp.inf), axis=-1)
    scale = jnp.maximum(peak / largest(FP8), jnp.float32(LEAST_SCALE))
    if scales == "power_of_two":
        scale = up_to_power_of_2(scale)
    return jnp.where(peak < jnp.inf, scale, jnp.float32(jnp.nan))


def quantized(latents: jax.Array, scales: Scales) -> jax.Array:
    """[..., 576] of any float dtype as [..., 656] bytes."""
    lead = latents.shape[:-1]
    groups = latents[..., :LATENT_DIM].astype(jnp.float32).reshape(*lead, NUM_GROUPS, GROUP)
    scale = group_scale(groups, scales)
    parts = quantize(groups, FP8, scale[..., None]), scale, latents[..., LATENT_DIM:].astype(jnp.bfloat16)
    # All sizes are explicit: with no tokens, none could be inferred.
    as_bytes = [
        _bytes(part).reshape(*lead, size)
        for part, size in zip(parts, (SCALES_AT, ROPE_AT - SCALES_AT, TOKEN_BYTES - ROPE_AT), strict=True)
    ]
    return jnp.concatenate(as_bytes, axis=-1)


def dequantized(tokens: jax.Array) -> jax.Array:
    """[..., 656] bytes as [..., 576] float32: exact, or with one rounding where scales are not powers of two."""
    lead = tokens.shape[:-1]
    values = lax.bitcast_convert_type(tokens[..., :SCALES_AT], FP8).astype(jnp.float32)
    scale = _wide(tokens[..., SCALES_AT:ROPE_AT], jnp.float32)
    latents = values.reshape(*lead, NUM_GROUPS, GROUP) * scale[..., None]
    rope = _wide(tokens[..., ROPE_AT:], jnp.bfloat16)
    return jnp.concatenate([latents.reshape(*lead, LATENT_DIM), rope.astype(jnp.float32)], axis=-1)


def _bytes(numbers: jax.Array) -> jax.Array:
    """Numbers as bytes, lowest first. By shifts: XLA cannot cast to another width where sizes are symbolic."""
    bits = lax.bitcast_convert_type(numbers, f"uint{8 * numbers.dtype.itemsize}")
    return (bits[..., None] >> _shifts(bits.dtype)).astype(BYTES)


def _wide(tokens: jax.Array, dtype: Any) -> jax.Array:
    """Bytes as numbers of several bytes."""
    size = jnp.dtype(dtype).itemsize
    *lead, width = tokens.shape
    bits = tokens.reshape(*lead, width // size, size).astype(f"uint{8 * size}")
    return lax.bitcast_convert_type(jnp.sum(bits << _shifts(bits.dtype), axis=-1, dtype=bits.dtype), dtype)


def _shifts(dtype: Any) -> jax.Array:
    return 8 * jnp.arange(dtype.itemsize, dtype=dtype)
