"""`page_scales`: scales of single pages of a quantised cache, from the tokens that are about to be written."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn._call.checks import LEAST_FLOAT32, ArgumentChecker
from pallas_attn._tile.quantization import QUANTIZED_DTYPES, largest

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
MARGIN = 1.5


def page_scales(
    key: jax.Array,
    value: jax.Array,
    k_scale: jax.Array,
    v_scale: jax.Array,
    slot_mapping: jax.Array,
    *,
    page_size: int,
    dtype: Any,
    margin: float = MARGIN,
) -> tuple[jax.Array, jax.Array]:
    """Scales of the pages that these tokens begin; call it before `write_kv`, which takes them.

    A page is begun by the call that fills its first slot. Its scale of each head is then such that the largest of
    that call's keys (or values) in the page, times `margin`, is the format's largest; if all of them are 0, it is 1.
    It stays until the page is begun anew: what was stored is not read again, and tokens that come later saturate
    beyond the margin. So a cache that lives long has scales as old as its pages, not as its first prompt; and a page
    that is freed and given away needs no clearing. Plain jnp, in place where the scales are donated or carried by a
    loop.

    Args:
        key, value, slot_mapping: as in `write_kv`: [num_tokens, num_kv_heads, head_dim], values of any width, and
            [num_tokens] int32. Tokens that are not written do not count.
        k_scale, v_scale: [num_pages, num_kv_heads] float32; of pages without tokens they may hold anything.
        page_size: slots of a page, at least 1.
        dtype: the cache's: float8_e4m3fn, float8_e5m2 or int8.
        margin: a number above 0.

    Returns:
        (k_scale, v_scale), updated.

    Raises:
        TypeError: an argument of the wrong type or dtype. ValueError: a wrong shape, page_size or margin.
    """
    check = ArgumentChecker("page_scales")
    check.array("key", key, ("num_tokens", "num_kv_heads", "head_dim"), DTYPES)
    check.array("value", value, ("num_tokens", "num_kv_heads", "value_dim"), [key.dtype])
    check.array("k_scale", k_scale, ("num_pages", "num_kv_heads"), [jnp.float32])
    check.array("v_scale", v_scale, ("num_pages", "num_kv_heads"), [jnp.float32])
    check.array("slot_mapping", slot_mapping, ("num_tokens",), [jnp.int32])
    check.count("page_size", page_size)
    check.dtype("dtype", dtype, QUANTIZED_DTYPES)
    check.positive_float("margin", margin, optional=False)
    slots, num_pages = jnp.asarray(slot_mapping), k_scale.shape[0]
    page = slots // page_size
    written = (slots >= 0) & (page < num_pages)
    # Beyond the last page, where mode="drop" ignores it.
    begun = jnp.where(written & (slots % page_size == 0), page, num_pages)
    is_begun = jnp.zeros(num_pages, bool).at[begun].set(True, mode="drop")
    into = jnp.where(written & is_begun.at[page].get(mode="clip"), page, num_pages)

    def updated(scales: jax.Array, new: jax.Array) -> jax.Array:
        peak = jnp.max(jnp.abs(new.astype(jnp.float32)), axis=-1)
        fitted = jnp.maximum(peak * (margin / largest(dtype)), jnp.where(peak > 0, LEAST_FLOAT32, 0))
        scales = jnp.asarray(scales).at[begun].set(0, mode="drop").at[into].max(fitted, mode="drop")
        mine = scales.at[begun].get(mode="clip")
        return scales.at[begun].set(jnp.where(mine == 0, 1.0, mine), mode="drop")

    return updated(k_scale, key), updated(v_scale, value)
