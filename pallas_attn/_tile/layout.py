"""Where a token lies in a pool of pages, for each cache layout."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn._call.pools import Which, packing


def token_index(layout: str, which: Which, page, offset, kv_head, dim, dtype: Any) -> tuple:
    """Index of elements of tokens in a pool: broadcastable page ids, offsets in the page, heads and elements."""
    match layout, which:
        case "NHD", _:
            return (page, offset, kv_head, dim)
        case "HND", _:
            return (page, kv_head, offset, dim)
        case "COMBINED", _:
            return (page, offset, 2 * kv_head + (which == "value"), dim)
        case "PACKED", "key":
            x = packing(dtype)
            return (page, kv_head, dim // x, offset, dim % x)
        case _:
            return (page, kv_head, dim, offset)


def to_nhd(cache: jax.Array, layout: str, which: Which) -> jax.Array:
    """An array of pages [..., a page's dimensions in `layout`] as [..., page_size, num_kv_heads, head_dim]."""
    match layout, which:
        case "NHD", _:
            return cache
        case "HND", _:
            return jnp.swapaxes(cache, -3, -2)
        case "COMBINED", _:
            return cache[..., which == "value" :: 2, :]
        case "PACKED", "key":  # [..., heads, head_dim/x, page_size, x]
            moved = jnp.moveaxis(cache, -2, -4)
            return moved.reshape(*moved.shape[:-2], moved.shape[-2] * moved.shape[-1])
        case _:  # [..., heads, head_dim, page_size]
            return jnp.moveaxis(cache, -1, -3)


def from_nhd(cache: jax.Array, layout: str, which: Which) -> jax.Array:
    """The inverse of `to_nhd`."""
    match layout, which:
        case "NHD", _:
            return cache
        case "HND", _:
            return jnp.swapaxes(cache, -3, -2)
        case "PACKED", "key":
            x = packing(cache.dtype)
            split = cache.reshape(*cache.shape[:-1], cache.shape[-1] // x, x)
            return jnp.moveaxis(split, -4, -2)
        case _:
            return jnp.moveaxis(cache, -3, -1)


def moved(move: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """`move(*arrays)`, a function that only moves elements of arrays of one dtype, bit for bit."""
    dtype = arrays[0].dtype
    if dtype != jnp.float8_e5m2:
        return move(*arrays)

    def in_bits(*arrays: jax.Array) -> jax.Array:
        bits = (jax.lax.bitcast_convert_type(array, jnp.uint8) for array in arrays)
        return jax.lax.bitcast_convert_type(move(*bits), dtype)

    # XLA on a CPU scatters e5m2 by way of a wider type, for the whole array, which changes NaN payloads. On a GPU it
    # does not, and the views, which may cost copies, are avoided.
    return jax.lax.platform_dependent(*arrays, cpu=in_bits, default=move)
