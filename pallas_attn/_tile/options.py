"""The options that every op over a cache shares, checked and normalised."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn._call.checks import ArgumentChecker, brief, plain
from pallas_attn._tile.layout import PoolShape
from pallas_attn._tile.quantization import checked_scale

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
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
