"""From a caller's layers, positions and page ids to places in a pool that all layers share.

Layer `l` owns pages [l * num_pages, (l + 1) * num_pages). Out of range becomes -1, which is never written to and reads
as NaN: merely shifted, it would name another layer's page.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call.checks import ArgumentChecker, check_int, is_array, is_traced, shown
from pallas_attn._tile.masking import usable_pages

LARGEST_INT32 = 2**31 - 1


def check_layer(check: ArgumentChecker, layer: Any, num_layers: int) -> int | jax.Array:
    """A layer's index as an int; a traced one as int32, -1 where it is out of range."""
    if not is_array(layer) or isinstance(layer, np.generic):
        check_int(check.function, "layer", layer)
    elif not jnp.issubdtype(layer.dtype, jnp.integer):
        check.fail("layer", "an int or an integer scalar", shown(layer), TypeError)
    elif layer.shape != ():
        check.fail("layer", "a scalar", shown(layer))
    if is_traced(layer):
        layer = _int32(layer)
        return jnp.where((layer >= 0) & (layer < num_layers), layer, -1)
    if not 0 <= int(layer) < num_layers:
        check.fail("layer", f"an index in [0, {num_layers}), the cache's layers", str(int(layer)))
    return int(layer)


def page_ids(check: ArgumentChecker, name: str, pages: Any) -> jax.Array:
    """A vector, list or tuple of integers of any width as [num_copies] int32; values beyond int32 become -1."""
    if isinstance(pages, list | tuple):
        pages = jnp.array([_page_id(check, name, page) for page in pages], jnp.int32)
    check.is_array(name, pages)
    if not jnp.issubdtype(pages.dtype, jnp.integer):
        check.fail(name, "integers", shown(pages), TypeError)
    check.array(name, pages, ("num_copies",), [pages.dtype])
    return jnp.asarray(_int32(pages))


def _page_id(check: ArgumentChecker, name: str, page: Any) -> Any:
    """An element of a list; under jit these are traced scalars."""
    if isinstance(page, jax.Array) and page.shape == () and jnp.issubdtype(page.dtype, jnp.integer):
        return _int32(page)
    check_int(check.function, name, page)
    return page if 0 <= page <= LARGEST_INT32 else -1


def _int32(integers: Any) -> Any:
    """Integers of any width as int32; negative where they overflow: 2**32 is not page 0."""
    narrow = integers.astype(np.int32)
    if integers.dtype.itemsize <= 4:
        return narrow
    xp = jnp if isinstance(integers, jax.Array) else np
    return xp.where((integers >= 0) & (integers <= LARGEST_INT32), narrow, -1)


def layer_tables(block_tables: jax.Array, num_pages: int, layer: int | jax.Array) -> jax.Array:
    """Block tables of one layer in a pool that holds `num_pages` pages for each layer; -1 where out of range."""
    usable = usable_pages(block_tables, num_pages) & (layer >= 0)
    return jnp.where(usable, block_tables + layer * num_pages, -1)


def of_layer(per_layer: jax.Array, layer: int | jax.Array) -> jax.Array:
    """A layer's row of [num_layers, ...]; NaN for a traced one out of range."""
    if isinstance(layer, int):
        return per_layer[layer]
    # Clipped: -1 must not count from the end.
    return jnp.where(layer >= 0, per_layer[jnp.maximum(layer, 0)], jnp.nan)


def every_layer(
    source_pages: jax.Array, target_pages: jax.Array, num_pages: int, num_layers: int
) -> tuple[jax.Array, ...]:
    """The same pages of all layers, [num_layers * num_copies]; -1 where out of range."""
    layers = jnp.arange(num_layers, dtype=jnp.int32)[:, None]
    return tuple(layer_tables(pages, num_pages, layers).reshape(-1) for pages in (source_pages, target_pages))


def token_slots(tables: jax.Array, page_size: int, positions: jax.Array) -> jax.Array:
    """Slots [num_seqs * n] of tokens at `positions` [num_seqs, n]; -1 where `tables` have no page for them."""
    column = positions // page_size
    held = (positions >= 0) & (column < tables.shape[1])
    pages = jnp.take_along_axis(tables, jnp.where(held, column, 0), axis=1)
    return jnp.where(held & (pages >= 0), pages * page_size + positions % page_size, -1).reshape(-1)
