"""Copying pages inside a pool, for sequences that part ways after sharing a prefix."""

import jax
import jax.numpy as jnp

from pallas_attn._call.checks import ArgumentChecker
from pallas_attn._tile.masking import usable_pages
from pallas_attn._types import KVCache


def copy_pages(cache: KVCache, source_pages: jax.Array, target_pages: jax.Array) -> KVCache:
    """Copies pages of one pool onto others of it, bit for bit (vLLM's `copy_blocks`).

    The pool is updated in place when it is donated or carried by a loop; only the pages named are read and written.
    `PagedKVCache.copy_pages` and `PagedLatentCache.copy_pages` do it in all layers at once.

    Args:
        cache: keys or values in any layout and dtype, or latents: [num_pages, ...].
        source_pages, target_pages: [num_copies] int32. A pair with an id outside [0, num_pages), such as -1, is
            skipped. Targets must differ from each other; what a page held before the call is what is copied from it.

    Returns:
        The pool, updated.

    Raises:
        TypeError, ValueError: page ids that are not two int32 vectors of one length; a pool without pages.
    """
    check = ArgumentChecker("copy_pages")
    # Outside jit they may be numpy's.
    cache, source_pages, target_pages = map(jnp.asarray, (cache, source_pages, target_pages))
    check.array("source_pages", source_pages, ("num_copies",), [jnp.int32])
    check.array("target_pages", target_pages, ("num_copies",), [jnp.int32])
    check.non_empty("cache", cache)
    num_pages = cache.shape[0]
    usable = usable_pages(source_pages, num_pages) & usable_pages(target_pages, num_pages)
    # Negative indices count from the end in jnp: skipped pairs go beyond it instead, where they are dropped.
    target = jnp.where(usable, target_pages, num_pages)
    return cache.at[target].set(cache.at[source_pages].get(mode="clip"), mode="drop")
