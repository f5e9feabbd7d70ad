"""Quantised KV caches: stored = round(value / scale), value = stored * scale.

The formats are vLLM's fp8 e4m3 and e5m2, and int8. Scales are float32: one for the tensor, one for each KV head, or one
for each page and KV head. A head's scale multiplies neither keys nor values: k_scale is folded into the logits' scale
and v_scale into the output, once a row instead of once an element. A page's `k_scale` multiplies its tokens' float32
logits, and its `v_scale` their values; multiplied into weights of a narrow type, small ones would be lost.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn._call.pools import FP8_DTYPES


def largest(dtype: Any) -> float:
    """The largest value of the format; int8 is used symmetrically."""
    return 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)


def compute_dtype(query_dtype: Any, cache_dtype: Any, *scales: Any) -> Any:
    """The dtype of keys, values and queries in a tile.

    fp8 values are exact in fp16, and the hardware converts them to fp16 in one instruction, to bf16 in three: so a bf16
    query is converted to fp16. Not with a scale for each page, whose range may exceed fp16's exponents.
    """
    if any(map(is_by_page, scales)):
        return query_dtype
    fp8 = any(cache_dtype == jnp.dtype(d) for d in FP8_DTYPES)
    return jnp.float16 if fp8 and query_dtype == jnp.bfloat16 else query_dtype


def query_as(query: jax.Array, dtype: Any) -> jax.Array:
    """The query in the compute dtype; what exceeds fp16 saturates."""
    if dtype == jnp.float16 and query.dtype != jnp.float16:
        largest_fp16 = float(jnp.finfo(jnp.float16).max)
        query = _within(query.astype(jnp.float32), largest_fp16)
    return query.astype(dtype)


def is_by_page(scale: Any) -> bool:
    """Whether a scale (an array, a ref or None) is [num_pages, num_kv_heads]."""
    return scale is not None and len(scale.shape) == 2


def apart(scale: Any) -> tuple[Any, Any]:
    """A scale as (one for heads, one for pages), at least one of them None."""
    return (None, scale) if is_by_page(scale) else (scale, None)


def quantize(values: jax.Array, dtype: Any, scale: jax.Array) -> jax.Array:
    """Rounds to the format, saturating: a plain fp8 cast turns what is too large into NaN or Inf."""
    scaled = values.astype(jnp.float32) / scale
    if dtype == jnp.int8:
        return _round(jnp.clip(scaled, -largest(dtype), largest(dtype))).astype(dtype)
    return saturated(scaled, dtype)


def magnitudes(values: jax.Array) -> jax.Array:
    """float32 magnitudes to choose a scale by; 0 for NaN and Inf, which must not affect other values."""
    magnitude = jnp.abs(values.astype(jnp.float32))
    return jnp.where(magnitude < jnp.inf, magnitude, 0.0)


def saturated(values: jax.Array, dtype: Any) -> jax.Array:
    """float32 cast to a dtype; fp8 saturates, where a plain cast would give NaN or Inf."""
    if any(dtype == jnp.dtype(d) for d in FP8_DTYPES):
        values = _within(values, largest(dtype))
    return values.astype(dtype)


def _within(values: jax.Array, most: float) -> jax.Array:
    """Clipped; NaN stays NaN, which Pallas' maximum on GPUs would turn into `-most`."""
    return jnp.where(jnp.isnan(values), values, jnp.clip(values, -most, most))


def up_to_power_of_2(x: jax.Array) -> jax.Array:
    """A normal positive float32 rounded up to a power of two."""
    # Powers of two have mantissa 0; for others the sum carries into the exponent.
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jax.lax.bitcast_convert_type((bits + 0x7FFFFF) & ~0x7FFFFF, jnp.float32)


def _round(x: jax.Array) -> jax.Array:
    """To the nearest integer, ties to even: jnp.round, which the Triton lowering lacks."""
    up = jnp.floor(x + 0.5)
    odd = up != 2 * jnp.floor(up / 2)
    return jnp.where((up == x + 0.5) & odd, up - 1, up)
