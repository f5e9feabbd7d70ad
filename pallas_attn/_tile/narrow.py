"""Tiles of an 8-bit cache on their way into products of 16 bits.

The tensor core takes its second operand in pairs of rows. Of values, whose rows are tokens, those are bytes of two
tokens, and no instruction fetches such pairs: Triton converts a tile in the layout of the product, reads every byte by
an instruction of its own, and copies tiles from memory eight bytes at a time to suit that. So values become 16-bit
numbers in the layout in which they arrive, 16 bytes a thread, go through shared memory once more, and are read from
there as 16-bit values are, already in pairs. Keys need none of it where they are read straight from shared memory:
their pairs lie side by side.

A thread then has 16 neighbouring numbers to write, in two writes of 16 bytes. Eight threads that wrote every second 16
bytes would meet at half of the banks; so columns are dealt: first the first eight of each thread's, then the others.
"""

from typing import Any

import jax
import jax.numpy as jnp

_AT_ONCE = 8  # 16-bit numbers that a thread writes at once


def deals(cache_dtype: Any, dtype: Any, layout: str) -> bool:
    """Whether values are `operand`s. Not those of the PACKED layout: its tokens lie side by side, and so do pairs."""
    return jnp.dtype(cache_dtype).itemsize == 1 and jnp.dtype(dtype).itemsize == 2 and layout != "PACKED"


def operand(tile: jax.Array, dtype: Any) -> jax.Array:
    """[tokens, dim] in `dtype`, of 16 bits, with its columns dealt."""
    return settled(dealt(tile).astype(dtype))


def dealt(tile: jax.Array) -> jax.Array:
    """[..., dim] with its columns dealt."""
    return _transposed(tile, (-1, 2, _AT_ONCE))


def in_order(tile: jax.Array) -> jax.Array:
    """The inverse of `dealt`."""
    return _transposed(tile, (2, -1, _AT_ONCE))


def _transposed(tile: jax.Array, columns: tuple[int, int, int]) -> jax.Array:
    return jnp.swapaxes(tile.reshape(*tile.shape[:-1], *columns), -3, -2).reshape(tile.shape)


def settled(array: jax.Array) -> jax.Array:
    """The same array, by way of a maximum of it and itself.

    Triton moves a conversion to the layout of a product to before what can be computed again in that layout: up to the
    load. It moves nothing to before a reduction. One over a single element would do by Triton alone, but XLA takes axes
    of one away before, and then converts there.
    """
    return jnp.max(jnp.stack([array, array], axis=-1), axis=-1)
