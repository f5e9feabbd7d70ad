"""Which keys a dense query sees by its place, and the tiles that a block of queries visits because of it.

Causal attention and windows, to either side, are one rule: a band along the diagonal. The same rule read the other way
round says which queries see a key, which is what gradients of keys and values are summed over.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn._tile.triton import ceil_div


class Band(NamedTuple):
    """Query i sees keys from i + offset - left to i + offset + right; None is no bound."""

    left: int | None = None
    right: int | None = None
    offset: int = 0

    def transposed(self) -> "Band":
        """The queries that a key is seen by."""
        return Band(self.right, self.left, -self.offset)

    def visible(self, query: jax.Array, key: jax.Array) -> list[jax.Array]:
        """The masks of single tokens, which broadcast. Places are compared, not differences: LLVM makes one subtraction
        of what a thread compares in a step, instead of one for each element."""
        masks = []
        if self.right is not None:
            masks.append(key <= query + (self.offset + self.right))
        if self.left is not None:
            masks.append(key >= query + (self.offset - self.left))
        return masks

    def seen(self, first, last, length) -> tuple[jax.Array, jax.Array]:
        """[begin, end) of the keys that any of the queries first ... last sees, of `length` keys."""
        begin, end = self._between(first, last, length)
        return jnp.clip(begin, 0, length), jnp.clip(end, 0, length)

    def seen_by_all(self, first, last, length) -> tuple[jax.Array, jax.Array]:
        """[begin, end) of the keys that each of them sees; the end may lie before the beginning."""
        return self.seen(last, first, length)

    def met(self, num_queries: int, length: int) -> tuple[int, int]:
        """[begin, end) of the keys that any query sees, known before anything runs."""
        begin, end = self._between(0, num_queries - 1, length)
        return max(begin, 0), min(end, length)

    def _between(self, left_of, right_of, length):
        """The keys from the one that `left_of` still sees to the one that `right_of` does, were there no ends."""
        begin = 0 * left_of if self.left is None else left_of + (self.offset - self.left)
        end = 0 * right_of + length if self.right is None else right_of + (self.offset + self.right + 1)
        return begin, end


class Tiles(NamedTuple):
    """Tiles [begin, end) are visited; in [clear, behind) every query of the block sees every key."""

    begin: jax.Array
    clear: jax.Array
    behind: jax.Array
    end: jax.Array


def tiles(seen: tuple[jax.Array, jax.Array], by_all: tuple[jax.Array, jax.Array], block: int) -> Tiles:
    """Tiles of `block` tokens, of the tokens that some and that all of a block's queries see."""
    begin, end = seen[0] // block, ceil_div(seen[1], block)
    end = jnp.maximum(begin, end)
    clear = jnp.clip(ceil_div(by_all[0], block), begin, end)
    return Tiles(begin, clear, jnp.clip(by_all[1] // block, clear, end), end)
