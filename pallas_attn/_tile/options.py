"""The options that attention over a cache has in every op, checked and brought into one form."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn._call.checks import ArgumentChecker, brief, plain
from pallas_attn._tile.layout import PoolShape
from pallas_attn._tile.quantization import checked_scale

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
# What is below 2**-126 becomes 0 in kernels, also a logit over its cap: with this cap, logits below 1e-8.
MOST_SOFTCAP = 1e30
# What the dimensions of the optional arrays are, for `_call.partition`.
DIMS = {
    "alibi_slopes": "heads",
    "sinks": "heads",
    "sliding_window": "one",
}


def scale_dims(operands: Mapping[str, jax.Array]) -> dict[str, str]:
    """Of the scales among a call's operands. Their pages are counted over the whole pool, but are no pool's."""
    return {
        name: "kv_heads" if operands[name].ndim == 1 else "scaled_pages kv_heads"
        for name in ("k_scale", "v_scale")
        if name in operands
    }


def scales(
    check: ArgumentChecker, cache_dtype: Any, pool: PoolShape, k_scale: Any, v_scale: Any
) -> dict[str, jax.Array]:
    """Those of a quantised cache, float32 [num_kv_heads] or [num_pages, num_kv_heads]."""
    given = {"k_scale": k_scale, "v_scale": v_scale}
    checked = {
        name: checked_scale(check.function, name, scale, cache_dtype, pool.num_kv_heads, pool.num_pages)
        for name, scale in given.items()
    }
    return {name: scale for name, scale in checked.items() if scale is not None}


def window(check: ArgumentChecker, sliding_window: Any) -> tuple[int | None, dict[str, jax.Array]]:
    """A window that is compiled in, or else one that is an operand."""
    if isinstance(sliding_window, jax.Array):
        check.array("sliding_window", sliding_window, (), [jnp.int32])
        return None, {"sliding_window": jnp.maximum(sliding_window, 1).reshape(1)}
    if sliding_window is None:
        return None, {}
    check.count("sliding_window", sliding_window)
    # No table holds more; what is beyond int32 would not fit positions.
    return min(int(sliding_window), 2**31 - 1), {}


def softcap(check: ArgumentChecker, softcap: Any) -> float | None:
    check.positive_float("softcap", softcap)
    if softcap is None:
        return None
    if plain(softcap) > MOST_SOFTCAP:
        check.fail("softcap", f"at most {MOST_SOFTCAP:g}", brief(softcap))
    return float(softcap)


def by_head(check: ArgumentChecker, **arrays: jax.Array | None) -> dict[str, jax.Array]:
    """[num_heads] each, as float32."""
    for name, array in arrays.items():
        if array is not None:
            check.array(name, array, ("num_heads",), DTYPES)
    return {name: array.astype(jnp.float32) for name, array in arrays.items() if array is not None}
