"""Scales of single pages of a quantised cache, from the tokens that are about to be written.

`page_scales` sets the scales of pages that are begun. `growing_scales`, which `PagedKVCache` uses, also lets scales of
earlier pages grow.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn._call import partition, symbolic
from pallas_attn._call.checks import LEAST_FLOAT32, ArgumentChecker
from pallas_attn._call.operands import dims, operands, ready
from pallas_attn._call.options import DTYPES
from pallas_attn._call.pools import QUANTIZED_DTYPES
from pallas_attn._tile.quantization import largest, magnitudes, up_to_power_of_2
from pallas_attn._types import Array

MARGIN = 1.5
# The scale of a page of zeros, from which it can grow to any useful one.
_LEAST, _MOST_GROWTH = 2.0**-64, 2.0**126


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
    beyond the margin (a `PagedKVCache` does read it, and its scales grow). So a cache that lives long has scales as old
    as its pages, not as its first prompt; and a page that is freed and given away needs no clearing. NaN and Inf do not
    count, so that the page's other tokens do not suffer: Inf saturates, NaN is read back as NaN from fp8, as some
    number from int8. Plain jnp, in place where the scales are donated or carried by a loop.

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
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, page_size or margin.
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
    given = _Operands(key=key, value=value, k_scale=k_scale, v_scale=v_scale, slot_mapping=slot_mapping)
    k_scale, v_scale = partition.run(
        check.function,
        _begun_scales,
        ready(given),
        ("pages kv_heads",) * 2,
        static={"page_size": page_size, "most": margin / largest(dtype)},
        implementation="xla",
    )
    return k_scale, v_scale


@operands
class _Operands:
    key: Array = dims("tokens kv_heads dim")
    value: Array = dims("tokens kv_heads dim")
    k_scale: Array = dims("pages kv_heads")
    v_scale: Array = dims("pages kv_heads")
    slot_mapping: Array = dims("tokens")


def _begun_scales(given: _Operands, *, page_size: int, most: float) -> tuple[jax.Array, jax.Array]:
    k_scale, v_scale = given.k_scale, given.v_scale
    peaks = _peaks(given.key, given.value, given.slot_mapping, k_scale.shape[0], page_size)

    def updated(scales: jax.Array, peak: jax.Array) -> jax.Array:
        fitted = jnp.where(peak > 0, jnp.maximum(peak * most, LEAST_FLOAT32), 1.0)
        begun = jnp.where(peaks.begun, peaks.pages, scales.shape[0])
        return scales.at[begun].set(fitted, mode="drop")

    return updated(k_scale, peaks.key), updated(v_scale, peaks.value)


class Growth(NamedTuple):
    """The pages whose scales grow, and the factors; the pages' contents are to be divided by them.

    pages: [num_tokens] int32, -1 where there is none; no page twice.
    key, value: [num_tokens, num_kv_heads] float32, at least 1.
    """

    pages: jax.Array
    key: jax.Array
    value: jax.Array


def growing_scales(
    key: jax.Array,
    value: jax.Array,
    k_scale: jax.Array,
    v_scale: jax.Array,
    slot_mapping: jax.Array,
    *,
    page_size: int,
    dtype: Any,
) -> tuple[jax.Array, jax.Array, Growth]:
    """(k_scale, v_scale, how they grew) before these tokens are written; arguments as in `page_scales`.

    A page that is begun takes the scale that its tokens need, without a margin. One that was begun earlier keeps its
    own while that is enough, and else grows by the least power of two that is. What it holds is then rounded again. But
    each growth at least doubles the steps, so the errors of all roundings of a token are together less than a step of
    the scale that the page ends with, which is less than twice what the page needs.

    Scales of fp8 are powers of two, by which its exponents move: so only the smallest values are rounded again. In int8
    that would cost up to a bit of seven.
    """
    peaks = _peaks(key, value, slot_mapping, k_scale.shape[0], page_size)
    begun = peaks.begun[:, None]

    def update(scales: jax.Array, peak: jax.Array) -> tuple[jax.Array, jax.Array]:
        now, factor = grown(scales.at[peaks.pages].get(mode="clip"), peak, begun, dtype)
        return scales.at[peaks.pages].set(now, mode="drop"), factor

    k_scale, k_factor = update(k_scale, peaks.key)
    v_scale, v_factor = update(v_scale, peaks.value)
    grows = (peaks.pages < k_scale.shape[0]) & jnp.any((k_factor > 1) | (v_factor > 1), axis=1)
    return k_scale, v_scale, Growth(jnp.where(grows, peaks.pages, -1), k_factor, v_factor)


def grown(was: jax.Array, peak: jax.Array, begun: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """(the new scale, its growth factor) of a page that gets values up to `peak`; the factor is 1 for a page that
    begins."""
    needed = jnp.maximum(peak / largest(dtype), _LEAST)
    needed = needed if jnp.dtype(dtype) == jnp.int8 else up_to_power_of_2(needed)
    factor = up_to_power_of_2(jnp.minimum(needed / was, _MOST_GROWTH))
    factor = jnp.where(~begun & (needed > was), factor, 1.0)
    return jnp.where(begun, needed, was * factor), factor


class _Peaks(NamedTuple):
    """Reductions over the tokens of each page that a call writes to, at the index of the page's first token; other
    entries are meaningless.

    pages: [num_tokens] int32; num_pages, where mode="drop" ignores it, for other tokens.
    begun: [num_tokens] bool, whether the page's first slot is written.
    key, value: [num_tokens, num_kv_heads] float32, the largest elements.
    """

    pages: jax.Array
    begun: jax.Array
    key: jax.Array
    value: jax.Array


def _peaks(key, value, slot_mapping, num_pages: int, page_size: int) -> _Peaks:
    slots = jnp.asarray(slot_mapping)
    token, page = jnp.arange(slots.size, dtype=jnp.int32), slots // page_size
    written = (slots >= 0) & (page < num_pages)
    page = jnp.where(written, page, num_pages)
    # Each page's first token, in memory that grows with the call, not with the pool.
    order = jnp.argsort(page, stable=True).astype(jnp.int32)
    first = order[symbolic.searchsorted(page[order], page, method="scan_unrolled")]
    first = jnp.where(written, first, slots.size)
    begins = slots % page_size == 0
    begun = begins.at[first].max(begins, mode="drop")
    peaks = jnp.stack([jnp.max(magnitudes(new), axis=-1) for new in (key, value)], axis=1)
    peaks = peaks.at[first].max(peaks, mode="drop")
    pages = jnp.where(first == token, page, num_pages)
    return _Peaks(pages, begun, peaks[:, 0], peaks[:, 1])
