"""Which keys a dense query sees by its position, and which tiles a block of queries therefore visits.

Causal attention and windows, to either side, are one rule: a band along the diagonal. Transposed, the same rule says
which queries see a key, over which gradients of keys and values are summed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.sizes import ceil_div


class Band(NamedTuple):
    """Query i sees keys from i + offset - left to i + offset + right; None is no bound."""

    left: int | None = None
    right: int | None = None
    offset: int = 0

    def transposed(self) -> "Band":
        """The queries that see a key."""
        return Band(self.right, self.left, -self.offset)

    def visible(self, query: jax.Array, key: jax.Array) -> list[jax.Array]:
        """Masks of single tokens, which broadcast. Positions are compared, not differences: LLVM then needs one
        subtraction a thread and step instead of one an element."""
        masks = []
        if self.right is not None:
            masks.append(key <= query + (self.offset + self.right))
        if self.left is not None:
            masks.append(key >= query + (self.offset - self.left))
        return masks

    def seen(self, first, last, length) -> tuple[jax.Array, jax.Array]:
        """[begin, end) of the `length` keys that any of the queries first ... last sees."""
        begin, end = self._between(first, last, length)
        return jnp.clip(begin, 0, length), jnp.clip(end, 0, length)

    def seen_by_all(self, first, last, length) -> tuple[jax.Array, jax.Array]:
        """[begin, end) of the keys that all of them see; the end may lie before the beginning."""
        return self.seen(last, first, length)

    def met(self, num_queries: int, length: int) -> tuple[int, int]:
        """[begin, end) of the keys that any query sees, as Python numbers."""
        begin, end = self._between(0, num_queries - 1, length)
        return max(begin, 0), min(end, length)

    def _between(self, left_of, right_of, length):
        """From the first key that `left_of` sees to the last that `right_of` sees, not clipped to the sequence."""
        begin = 0 * left_of if self.left is None else left_of + (self.offset - self.left)
        end = 0 * right_of + length if self.right is None else right_of + (self.offset + self.right + 1)
        return begin, end


class Tiles(NamedTuple):
    """Tiles [begin, end) are visited; in [clear, behind) every query of the block sees every key."""

    begin: jax.Array | int
    clear: jax.Array
    behind: jax.Array
    end: jax.Array

    def among(self, first: jax.Array, last: jax.Array) -> "Tiles":
        """Those in [first, last)."""
        begin, end = jnp.clip(first, self.begin, self.end), jnp.clip(last, self.begin, self.end)
        clear = jnp.clip(self.clear, begin, end)
        return Tiles(begin, clear, jnp.clip(self.behind, clear, end), end)

    def over_edges(self, visit: Callable[[jax.Array, Any], Any], state: Any) -> Any:
        """`state` after visit(tile, state) for the tiles outside [clear, behind). One loop for both edges: with a
        second one a kernel is half as long again, and takes that much longer to compile."""
        before = self.clear - self.begin

        def at_edge(i: jax.Array, state: Any) -> Any:
            return visit(jnp.where(i < before, self.begin + i, self.behind + i - before), state)

        return lax.fori_loop(0, before + self.end - self.behind, at_edge, state)


def tiles(seen: tuple[jax.Array, jax.Array], by_all: tuple[jax.Array, jax.Array], block: int) -> Tiles:
    """Tiles of `block` tokens, of the tokens that some and that all of a block's queries see."""
    begin, end = seen[0] // block, ceil_div(seen[1], block)
    end = jnp.maximum(begin, end)
    clear = jnp.clip(ceil_div(by_all[0], block), begin, end)
    return Tiles(begin, clear, jnp.clip(by_all[1] // block, clear, end), end)
