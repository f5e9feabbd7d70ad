"""What rounding to 16 bits loses of float32 numbers: the next lower bits, in an int8 or int16.

The bits of floats of one sign, read as integers, keep their order. So an exact number and its rounded one differ by a
small integer whatever their size: at most half of bf16's last bit, 2**15, or of fp16's, 2**12. A byte holds the upper
bits of that.
"""

import jax
import jax.numpy as jnp
import numpy as np


def are_lost(dtype: jax.typing.DTypeLike) -> bool:
    """Whether rounding to `dtype` loses bits."""
    return jnp.dtype(dtype).itemsize == 2


def of(exact: jax.Array, rounded: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The difference of `exact`, in float32, and the same `rounded`, as an int8 or int16 `dtype`."""
    shift, most = _shift(rounded.dtype, dtype), np.int32(jnp.iinfo(dtype).max)
    lost = _bits(exact) - _bits(rounded)
    if shift:
        lost = (lost + np.int32(1 << (shift - 1))) >> np.int32(shift)
    return jnp.minimum(jnp.maximum(lost, -most), most).astype(dtype)


def joined(rounded: jax.Array, low: jax.Array | None) -> jax.Array:
    """The float32 number, nearly exact; `rounded` itself if `low` is None."""
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
    """How many of the lost bits do not fit in `low`."""
    lost = jnp.finfo(jnp.float32).nmant - jnp.finfo(rounded).nmant
    return max(0, lost - jnp.iinfo(low).bits)
