"""Where a token lies in a pool of pages, for each cache layout."""

from typing import NamedTuple

import jax

LAYOUTS = ("NHD", "HND")


class PoolShape(NamedTuple):
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int


def cache_dims(layout: str) -> tuple[str, str, str, str]:
    """Dimension names of a cache pool, for checks and messages."""
    if layout == "NHD":
        return ("num_pages", "page_size", "num_kv_heads", "head_dim")
    return ("num_pages", "num_kv_heads", "page_size", "head_dim")


def array_shape(pool: PoolShape, layout: str) -> tuple[int, int, int, int]:
    sizes = pool._asdict()
    return tuple(sizes[dim] for dim in cache_dims(layout))


def pool_shape(cache: jax.Array, layout: str) -> PoolShape:
    return PoolShape(**dict(zip(cache_dims(layout), cache.shape, strict=True)))


def token_index(layout: str, page, offset, kv_head, dim) -> tuple:
    """Index of elements of tokens in a pool: broadcastable page ids, offsets in the page, heads and elements."""
    return (page, offset, kv_head, dim) if layout == "NHD" else (page, kv_head, offset, dim)
