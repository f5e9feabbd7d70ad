"""Pools of pages: their dtypes and layouts, what a call may bring, and which of them a kernel can address."""

import math
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from pallas_attn._call.checks import ArgumentChecker, fail
from pallas_attn._call.device import current_device
from pallas_attn._types import Array

FP8_DTYPES = (jnp.float8_e4m3fn, jnp.float8_e5m2)
QUANTIZED_DTYPES = (*FP8_DTYPES, jnp.int8)


def is_quantized(dtype: Any) -> bool:
    return any(dtype == jnp.dtype(d) for d in QUANTIZED_DTYPES)


LAYOUTS = ("NHD", "HND", "PACKED")
MOST_TILE = 2**16  # tokens; none that compiles has more
Which = Literal["key", "value"]


# A pool's dimensions in words, for `_call.partition`.
DIMS: dict[str, dict[Which, str]] = {
    "NHD": dict.fromkeys(("key", "value"), "pages slot kv_heads dim"),
    "HND": dict.fromkeys(("key", "value"), "pages kv_heads slot dim"),
    "PACKED": {"key": "pages kv_heads dim slot x", "value": "pages kv_heads dim slot"},
    # One pool for both, keys in even heads and values in odd ones; used by `compat` only.
    "COMBINED": dict.fromkeys(("key", "value"), "pages slot kv_heads dim"),
}
# The dimensions of scales. Their pages count over the whole pool, but scales are replicated, not a pool.
SCALE_DIMS = ("kv_heads", "scaled_pages kv_heads")


class PoolShape(NamedTuple):
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int


def packing(dtype: Any) -> int:
    """x of the PACKED layout: elements in 16 bytes."""
    return 16 // jnp.dtype(dtype).itemsize


def check_pools(
    check: ArgumentChecker,
    key_cache: Any,
    value_cache: Any,
    layout: str,
    dtypes: Any,
    named: str = "layout",
    value_dim: str = "head_dim",
) -> PoolShape:
    """Checks both pools of a call and binds their dimensions; `named` is the call's name for the layout argument.

    `value_dim` names another dimension than head_dim where values may differ in width from keys; head_dim must then be
    bound already.
    """
    check.one_of(named, layout, LAYOUTS)
    if layout == "PACKED":
        check.array("value_cache", value_cache, ("num_pages", "num_kv_heads", value_dim, "page_size"), dtypes)
        x = packing(value_cache.dtype)
        if check.dims["head_dim"] % x:
            fail(check.function, "value_cache", f"head_dim a multiple of x={x}", str(check.dims["head_dim"]))
        packed = ("num_pages", "num_kv_heads", check.dims["head_dim"] // x, "page_size", x)
        check.array("key_cache", key_cache, packed, [value_cache.dtype])
    else:
        dims = ("page_size", "num_kv_heads") if layout == "NHD" else ("num_kv_heads", "page_size")
        check.array("key_cache", key_cache, ("num_pages", *dims, "head_dim"), dtypes)
        check.array("value_cache", value_cache, ("num_pages", *dims, value_dim), [key_cache.dtype])
    check.non_empty("key_cache", key_cache)
    return PoolShape(*(check.dims[dim] for dim in PoolShape._fields))


def array_shape(
    pool: PoolShape, layout: str, which: Which = "key", dtype: Any = jnp.bfloat16
) -> tuple[int, ...]:
    pages, page_size, heads, head_dim = pool
    match layout, which:
        case "NHD", _:
            return (pages, page_size, heads, head_dim)
        case "HND", _:
            return (pages, heads, page_size, head_dim)
        case "PACKED", "key":
            x = packing(dtype)
            return (pages, heads, head_dim // x, page_size, x)
        case _:
            return (pages, heads, head_dim, page_size)


def pool_shape(value_cache: Array, layout: str) -> PoolShape:
    """From the value pool: PACKED keys split head_dim in two."""
    a, b, c, d = value_cache.shape
    match layout:
        case "NHD":
            return PoolShape(a, b, c, d)
        case "HND":
            return PoolShape(a, c, b, d)
        case _:
            return PoolShape(a, d, b, c)


def key_pool_shape(key_cache: Array, layout: str) -> PoolShape:
    """From the key pool, for calls whose values may have another width."""
    if layout == "PACKED":
        pages, heads, parts, page_size, x = key_cache.shape
        return PoolShape(pages, page_size, heads, parts * x)
    if layout == "COMBINED":
        pages, page_size, heads, head_dim = key_cache.shape
        return PoolShape(pages, page_size, heads // 2, head_dim)
    return pool_shape(key_cache, layout)


def table_tokens(columns: int, page_size: int) -> int:
    """Tokens that a row of a block table can hold, as far as int32 counts them, rounded up to tiles and pages."""
    return min(columns * page_size, 2**31 - max(MOST_TILE, page_size))


def reaches(pool: PoolShape, dtype: Any, lowering: str) -> str | None:
    """Why a kernel of this lowering cannot handle a pool on this device, or None."""
    return handles("pools", math.prod(pool), dtype, lowering)


def handles(arrays: str, elements: int, dtype: Any, lowering: str) -> str | None:
    """Why a kernel of this lowering cannot handle arrays of so many elements on this device, or None."""
    if lowering == "interpret":
        return None
    if lowering == "pallas" and jnp.dtype(dtype).itemsize == 1 and 2**31 <= elements <= 2**32:
        # Its lowering switches to 64-bit offsets above 2**32 bytes; between, they overflow.
        return f"8-bit {arrays} of 2**31 to 2**32 elements overflow Pallas-Triton's offsets, got {elements} elements"
    device = current_device()
    if dtype == jnp.float8_e4m3fn and not device.architecture.converts_e4m3:
        return (
            f"float8_e4m3fn needs sm_89 or newer, the device is sm_{device.compute_capability} (float8_e5m2 and "
            "int8 work)"
        )
    return None


def serves_latents(operands: Any, lowering: str) -> str | None:
    """Why a kernel of this lowering cannot handle MLA's queries and latents on this device, or None."""
    if operands.query.dtype == jnp.float32 and lowering != "interpret":
        return "float32 tiles of 576 do not fit the kernel; bf16 and fp16 do"
    return reaches(operands.pool, operands.latent_cache.dtype, lowering)
