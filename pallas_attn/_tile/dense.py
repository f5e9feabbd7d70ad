"""Tiles of dense arrays, whose tokens are not paged.

Layouts are named as in jax.nn: "BTNH" is [batch, tokens, heads, dim], "BNTH" is [batch, heads, tokens, dim]. Inside
kernels a query's head is two indices, its KV head and its place in the group.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn._call.sizes import Chunk
from pallas_attn._tile import rows, triton

type DenseLayout = Literal["BTNH", "BNTH"]


class Stream(NamedTuple):
    """The tokens of one head of one batch entry."""

    layout: str
    batch: jax.Array
    heads: tuple[jax.Array, ...]

    def _leading(self, tokens: jax.Array) -> tuple[jax.Array, ...]:
        if self.layout == "BTNH":
            return (self.batch, tokens, *self.heads)
        return (self.batch, *self.heads, tokens)

    def read(self, ref: Any, tokens: jax.Array, real: jax.Array, chunks: Sequence[Chunk]) -> list[jax.Array]:
        """[tokens, size] of each chunk; 0 where a token is not `real`, whatever is stored there."""
        places = (rows.elements(ref, self._leading(tokens), real, chunk) for chunk in chunks)
        return [triton.load(place, mask=mask, other=0.0) for place, mask in places]

    def write(
        self,
        ref: Any,
        tokens: jax.Array,
        real: jax.Array,
        chunks: Sequence[Chunk],
        tile: Sequence[jax.Array],
    ) -> None:
        # Triton deals out all tiles of one shape alike, by that of which a thread moves the most elements at a time. Of
        # bytes those are 16, and then keys and values would be copied every other 16 bytes at a time.
        neighbours = 8 if jnp.dtype(ref.dtype).itemsize == 1 else None
        for chunk, part in zip(chunks, tile, strict=True):
            place, mask = rows.elements(ref, self._leading(tokens), real, chunk, neighbours=neighbours)
            triton.store(place, part.astype(ref.dtype), mask=mask)


def per_token(ref: Any, leading: Sequence[jax.Array], tokens: jax.Array) -> Any:
    """Places in an array [*leading, tokens]."""
    return ref.at[(*(jnp.broadcast_to(i, tokens.shape) for i in leading), tokens)]
