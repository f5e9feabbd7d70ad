"""The options that every op over a cache shares, checked and normalised."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call.checks import (
    LARGEST_FLOAT32,
    LEAST_FLOAT32,
    ArgumentChecker,
    brief,
    fail,
    is_array,
    is_number,
    plain,
    shown,
)
from pallas_attn._call.pools import PoolShape, is_quantized

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
"""Of queries, and of keys and values that are not quantised."""
# Kernels flush below 2**-126 to 0, and so a logit divided by its cap: with this cap, logits below 1e-8.
MOST_SOFTCAP = 1e30


def xla_supports(operands: Any) -> str | None:
    """Why a reference cannot serve a call, or None."""
    if operands.batch_invariant:
        return "is not batch_invariant: its sums are those of one product over the whole batch"
    return None


def scales(
    check: ArgumentChecker, cache_dtype: Any, pool: PoolShape, k_scale: Any, v_scale: Any
) -> tuple[jax.Array | None, jax.Array | None]:
    """The scales of a quantised cache, float32 [num_kv_heads] or [num_pages, num_kv_heads]."""
    pages = (cache_dtype, pool.num_kv_heads, pool.num_pages)
    return (
        checked_scale(check.function, "k_scale", k_scale, *pages),
        checked_scale(check.function, "v_scale", v_scale, *pages),
    )


def checked_scale(
    function: str, name: str, scale: Any, cache_dtype: Any, num_kv_heads: int, num_pages: int | None = None
) -> jax.Array | None:
    """A scale as float32 [num_kv_heads] (1 if None) or, with `num_pages`, also [num_pages, num_kv_heads]; None for a
    cache that is not quantised."""
    if not is_quantized(cache_dtype):
        if scale is not None:
            fail(function, name, f"None for a cache of {jnp.dtype(cache_dtype).name}", "a scale")
        return None
    if scale is None:
        scale = 1.0
    real = is_number(scale) or (
        is_array(scale) and any(jnp.issubdtype(scale.dtype, kind) for kind in (jnp.floating, jnp.integer))
    )
    if not real:
        fail(function, name, "a number or an array of numbers, or None", shown(scale), TypeError)
    by_page = num_pages is not None and getattr(scale, "shape", None) == (num_pages, num_kv_heads)
    # Not arrays on a device, which the host would wait for, nor scales of pages, which may be unwritten.
    if not isinstance(scale, jax.Array) and not by_page:
        values = scale if is_number(scale) else np.asarray(scale, np.float64)
        if not np.all((values >= LEAST_FLOAT32) & (values <= LARGEST_FLOAT32)):
            fail(function, name, "finite numbers above 0", shown(scale))
    scale = jnp.asarray(scale, jnp.float32)
    if by_page:
        return scale
    if scale.shape not in ((), (1,), (num_kv_heads,)):
        pages = "" if num_pages is None else f" or [num_pages={num_pages}, num_kv_heads={num_kv_heads}]"
        expected = f"a scalar or shape [num_kv_heads={num_kv_heads}]{pages}"
        fail(function, name, expected, f"shape {list(scale.shape)}")
    return jnp.broadcast_to(scale, (num_kv_heads,))


def window(check: ArgumentChecker, sliding_window: Any) -> tuple[int | None, jax.Array | None]:
    """(the window if it is compiled in, the window as an operand int32 [1]): at most one of the two."""
    if isinstance(sliding_window, jax.Array):
        check.array("sliding_window", sliding_window, (), [jnp.int32])
        return None, jnp.maximum(sliding_window, 1).reshape(1)
    if sliding_window is None:
        return None, None
    check.count("sliding_window", sliding_window)
    # No table is longer, and positions are int32.
    return min(int(sliding_window), 2**31 - 1), None


def softcap(check: ArgumentChecker, softcap: Any) -> float | None:
    check.positive_float("softcap", softcap)
    if softcap is None:
        return None
    if plain(softcap) > MOST_SOFTCAP:
        check.fail("softcap", f"at most {MOST_SOFTCAP:g}", brief(softcap))
    return float(softcap)


def by_head(check: ArgumentChecker, name: str, array: jax.Array | None) -> jax.Array | None:
    """[num_heads], as float32."""
    if array is None:
        return None
    check.array(name, array, ("num_heads",), DTYPES)
    return array.astype(jnp.float32)
