"""Copying pages inside a pool, for sequences that part ways after sharing a prefix."""

from collections.abc import Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call import partition
from pallas_attn._call.checks import ArgumentChecker, shown
from pallas_attn._call.operands import dims, operands, ready
from pallas_attn._tile.layout import moved
from pallas_attn._tile.masking import usable_pages
from pallas_attn._types import Array, KVCache
from pallas_attn.ops.kv_cache.addressing import page_ids

type PageIds = jax.Array | np.ndarray | Sequence[SupportsIndex]


def copy_pages(cache: KVCache, source_pages: PageIds, target_pages: PageIds) -> KVCache:
    """Copies pages of one pool onto others of it, bit for bit (vLLM's `copy_blocks`).

    The pool is updated in place when it is donated or carried by a loop; only the pages named are read and written.
    `PagedKVCache.copy_pages` and `PagedLatentCache.copy_pages` do it in all layers at once.

    Args:
        cache: keys or values in any layout and dtype, or latents: [num_pages, ...].
        source_pages, target_pages: [num_copies] integers of any width, or lists of ints. A pair with an id outside
            [0, num_pages), such as -1, is skipped. Targets must differ from each other; what a page held before the
            call is what is copied from it.

    Returns:
        The pool, updated.

    Raises:
        TypeError: a cache that is no array, page ids that are not integers.
        ValueError: page ids that are not two vectors of one length; a pool without pages.
    """
    check = ArgumentChecker("copy_pages")
    check.is_array("cache", cache)
    if len(cache.shape) < 2:
        check.fail("cache", "shape [num_pages, ...] of a pool", shown(cache))
    check.non_empty("cache", cache)
    source_pages, target_pages = copied_pages(check, source_pages, target_pages)
    given = ready(_Operands(cache=cache, source_pages=source_pages, target_pages=target_pages))
    (copied,) = partition.run(check.function, _copied, given, (_pool(given),), implementation="xla")
    return copied


def _pool(self: Any) -> str:
    return " ".join(["pages", *(f"{partition.BATCH}{i}" for i in range(1, self.cache.ndim))])


@operands
class _Operands:
    cache: Array = dims(_pool)
    source_pages: Array = dims("copies")
    target_pages: Array = dims("copies")


def _copied(operands: _Operands) -> tuple[jax.Array]:
    return (copy_rows(operands.cache, operands.source_pages, operands.target_pages),)


def copied_pages(check: ArgumentChecker, source_pages, target_pages) -> tuple[jax.Array, jax.Array]:
    """Checks the page ids of a call, for one pool or for the pools of a cache."""
    source_pages = page_ids(check, "source_pages", source_pages)
    return source_pages, page_ids(check, "target_pages", target_pages)


def copy_rows(cache: KVCache, source_pages: jax.Array, target_pages: jax.Array) -> KVCache:
    num_pages = cache.shape[0]
    usable = usable_pages(source_pages, num_pages) & usable_pages(target_pages, num_pages)
    # Negative indices count from the end in jnp: skipped pairs go past the end instead, where they are dropped.
    target = jnp.where(usable, target_pages, num_pages)

    def copied(cache: jax.Array) -> jax.Array:
        return cache.at[target].set(cache.at[source_pages].get(mode="clip"), mode="drop")

    return moved(copied, cache)
