"""Which tiles of a sequence's keys a block of query rows walks: all that some row sees, none other.

Most of them every row sees whole. Those at the causal edge, at the window's edge and at the sequence's end some rows
see in part: only they pay for masks, and only they may hold slots that nothing was written to.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.sizes import ceil_div
from pallas_attn._tile import masking


class Span(NamedTuple):
    """Tiles [0, count) of `block_kv` tokens, the first of which holds `seen_from`; [whole_begin, whole_end) of them are
    seen whole by every row."""

    block_kv: int
    first_tile: jax.Array
    origin: jax.Array | int
    """Position at which a tile begins, and all others by whole tiles from it."""
    seen_from: jax.Array
    end: jax.Array
    """Positions [seen_from, end) are seen by some row."""
    count: jax.Array
    whole_begin: jax.Array
    whole_end: jax.Array

    def start(self, tile: jax.Array) -> jax.Array:
        """Position of a tile's first token."""
        return self.origin + (self.first_tile + tile) * self.block_kv

    def held(self, position: jax.Array) -> jax.Array:
        return (position >= self.seen_from) & (position < self.end)

    def walk(self, state: Any, begin, end, step: Callable[..., Any], ahead: Callable[[Any], Any]) -> Any:
        """`state` after step(tile, state, ready) for the span's tiles among [begin, end): first those that every row
        sees whole, then, with `ready` None, those at the edges.

        `ready` is what ahead(tile) gave one tile before: loads that depend on it can be issued without waiting.
        """
        begin, end = jnp.clip(begin, 0, self.count), jnp.clip(end, 0, self.count)
        lo = jnp.clip(self.whole_begin, begin, end)
        hi = jnp.clip(self.whole_end, lo, end)
        before = lo - begin

        def whole(tile, carry):
            state, ready = carry
            upcoming = ahead(tile + 1)
            return step(tile, state, ready), upcoming

        def at_edge(i, state):
            return step(jnp.where(i < before, begin + i, hi + (i - before)), state, None)

        state, _ = lax.fori_loop(lo, hi, whole, (state, ahead(lo)))
        return lax.fori_loop(0, before + (end - hi), at_edge, state)


def span(
    first_query: jax.Array,
    last_query: jax.Array,
    begin: jax.Array | int,
    end: jax.Array,
    *,
    causal: bool,
    window: int | jax.Array | None,
    block_kv: int,
    seen_by_all: jax.Array | None = None,
) -> Span:
    """For queries at positions [first_query, last_query] over keys at [begin, end).

    seen_by_all: end of the positions that causal queries all see; None: up to the first one itself.
    """
    seen_end = jnp.clip(last_query + 1, begin, end) if causal else end
    seen_by_all = first_query + 1 if seen_by_all is None else seen_by_all
    whole_end = jnp.clip(seen_by_all, begin, end) if causal else end
    seen_from = jnp.maximum(masking.window_start(first_query, window), begin)
    whole_from = jnp.maximum(masking.window_start(last_query, window), begin)
    first_tile = (seen_from - begin) // block_kv
    count = jnp.maximum(ceil_div(seen_end - begin, block_kv) - first_tile, 0)
    whole_begin = ceil_div(whole_from - begin, block_kv) - first_tile
    return Span(
        block_kv,
        first_tile,
        begin,
        seen_from,
        seen_end,
        count,
        whole_begin,
        (whole_end - begin) // block_kv - first_tile,
    )
