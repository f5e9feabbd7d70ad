"""What rounding to 16 bits takes from float32 numbers: their next lower bits, in an integer of 8 or 16.

Read as integers, floats of one sign are in their order, so the difference of an exact number and a rounded one is a
small integer whatever their size: half of a last bit of bf16 is 2**15, of fp16 2**12. A byte has the upper bits of it.
"""

import jax
import jax.numpy as jnp
import numpy as np


def are_lost(dtype: jax.typing.DTypeLike) -> bool:
    """Whether rounding to `dtype` loses any."""
    return jnp.dtype(dtype).itemsize == 2


def of(exact: jax.Array, rounded: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """`exact` in float32, and itself `rounded`; the difference as an int8 or int16 `dtype`."""
    shift, most = _shift(rounded.dtype, dtype), np.int32(jnp.iinfo(dtype).max)
    lost = _bits(exact) - _bits(rounded)
    if shift:
        lost = (lost + np.int32(1 << (shift - 1))) >> np.int32(shift)
    return jnp.minimum(jnp.maximum(lost, -most), most).astype(dtype)


def joined(rounded: jax.Array, low: jax.Array | None) -> jax.Array:
    """The number in float32, nearly as it was; `rounded` itself where nothing was kept."""
    if low is None:
        return rounded.astype(jnp.float32)
    bits = _bits(rounded) + (low.astype(jnp.int32) << _shift(rounded.dtype, low.dtype))
    upper = rounded.astype(jnp.float32)
    lower = jax.lax.bitcast_convert_type(bits, jnp.float32) - upper
    # The gradient is that of `rounded`.
    return upper + jax.lax.stop_gradient(jnp.where(jnp.isfinite(upper), lower, 0.0))


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)


def _shift(rounded: jax.typing.DTypeLike, low: jax.typing.DTypeLike) -> int:
    """How many of the lost bits `low` has no room for."""
    lost = jnp.finfo(jnp.float32).nmant - jnp.finfo(rounded).nmant
    return max(0, lost - jnp.iinfo(low).bits)
