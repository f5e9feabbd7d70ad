"""Which tiles of a sequence's keys a block of query rows walks: exactly those that some row sees.

Most of them are fully visible to every row. Only those at the causal edge, at the window's edge and at the sequence's
end need masks, and only they may contain unwritten slots.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn._tile import masking
from pallas_attn._tile.band import Tiles, tiles
from pallas_attn._tile.walk import Seen


class Span(NamedTuple):
    """Tiles of `block_kv` tokens, numbered from the one that holds `seen_from`."""

    block_kv: int
    tiles: Tiles
    first_tile: jax.Array
    """Number of that tile, counted from `origin`."""
    origin: jax.Array | int
    """Position at which tile 0 of all begins."""
    seen_from: jax.Array
    end: jax.Array
    """Positions [seen_from, end) are seen by some row."""
    left: Seen | None = None
    """What a mask leaves of them; tiles that it empties have no number."""

    @property
    def count(self) -> jax.Array:
        return self.tiles.end

    def start(self, tile: jax.Array) -> jax.Array:
        """Position of a tile's first token."""
        number = self.first_tile + tile
        if self.left is not None:
            number = self.left.gap_of(self.block_kv).back(number)
        return self.origin + number * self.block_kv

    def held(self, position: jax.Array) -> jax.Array:
        held = (position >= self.seen_from) & (position < self.end)
        return held if self.left is None else held & self.left.among(position)

    def walk(self, state: Any, begin, end, step: Callable[..., Any], ahead: Callable[[Any], Any]) -> Any:
        """`state` after step(tile, state, ready) for the tiles in [begin, end): first those that every row sees whole,
        then, with `ready` None, those at the edges.

        `ready` is what ahead(tile) returned one tile earlier, so that loads that depend on it need not wait.
        """
        mine = self.tiles.among(begin, end)

        def whole(tile, carry):
            state, ready = carry
            upcoming = ahead(tile + 1)
            return step(tile, state, ready), upcoming

        state, _ = lax.fori_loop(mine.clear, mine.behind, whole, (state, ahead(mine.clear)))
        return mine.over_edges(lambda tile, state: step(tile, state, None), state)


def span(
    first_query: jax.Array,
    last_query: jax.Array,
    begin: jax.Array | int,
    end: jax.Array,
    *,
    causal: bool,
    sliding_window: int | jax.Array | None,
    block_kv: int,
    seen_by_all: jax.Array | None = None,
    left: Seen | None = None,
) -> Span:
    """For queries at positions [first_query, last_query] over keys at [begin, end).

    seen_by_all: end of the positions that causal queries all see; None: up to the first one itself.
    left: those that a mask leaves, where `begin` is 0; None: all.
    """
    seen_end = jnp.clip(last_query + 1, begin, end) if causal else end
    seen_by_all = first_query + 1 if seen_by_all is None else seen_by_all
    whole_end = jnp.clip(seen_by_all, begin, end) if causal else end
    seen_from = jnp.maximum(masking.window_start(first_query, sliding_window), begin)
    whole_from = jnp.maximum(masking.window_start(last_query, sliding_window), begin)
    if left is not None:
        seen_from, whole_from = jnp.maximum(seen_from, left.first), jnp.maximum(whole_from, left.rest)
        seen_end, whole_end = (jnp.minimum(x, left.end) for x in (seen_end, whole_end))
    found = tiles((seen_from - begin, seen_end - begin), (whole_from - begin, whole_end - begin), block_kv)
    if left is not None:
        gap = left.gap_of(block_kv)
        found = Tiles(*(gap.without(jnp.asarray(tile)) for tile in found))
    clear, behind, last = (tile - found.begin for tile in found[1:])
    numbers = Tiles(0, clear, behind, last)
    return Span(block_kv, numbers, jnp.asarray(found.begin), begin, seen_from, seen_end, left)
