"""Tiles of an 8-bit cache as operands of 16-bit products.

The tensor core takes its second operand in pairs of rows. The rows of values are tokens, so a pair is bytes of two
tokens, which no instruction fetches: Triton would convert a tile in the product's layout, read every byte by an
instruction of its own, and to suit that copy tiles from memory eight bytes at a time. So values are converted to 16
bits in the layout in which they arrive, 16 bytes a thread, pass through shared memory once more, and are read from
there as 16-bit values are, in pairs. Keys that are read straight from shared memory do not need this: their pairs are
neighbours.

A thread then writes 16 neighbouring numbers as two stores of 16 bytes. Eight threads that store every second 16 bytes
would use half of the banks; so columns are interleaved ("dealt"): first the first eight of each thread, then the
others.
"""

from typing import Any

import jax
import jax.numpy as jnp

_AT_ONCE = 8  # 16-bit numbers that a thread writes at once


def deals(cache_dtype: Any, dtype: Any, layout: str) -> bool:
    """Whether values go through `operand`; not in the PACKED layout, where pairs are neighbours."""
    return jnp.dtype(cache_dtype).itemsize == 1 and jnp.dtype(dtype).itemsize == 2 and layout != "PACKED"


def operand(tile: jax.Array, dtype: Any) -> jax.Array:
    """[tokens, dim] in a 16-bit `dtype`, with its columns dealt."""
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
    """The same array, through a maximum of it and itself.

    Triton hoists the conversion to a product's layout above everything that it can recompute in that layout, up to the
    load, but not above a reduction. A reduction over a single element would stop standalone Triton; XLA removes axes of
    size one beforehand.
    """
    return jnp.max(jnp.stack([array, array], axis=-1), axis=-1)
