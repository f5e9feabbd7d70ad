"""A tile of MLA latents in a kernel, from pools of plain elements and of 656 bytes a token.

Latent elements are keys and values at once. Plain ones are used as they lie in the pool; bytes become bf16 first, and
then the same products follow.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._call.device import current_device
from pallas_attn._tile.latents import (
    BYTES,
    FP8,
    GROUP,
    LATENT_DIM,
    ROPE_AT,
    ROPE_DIM,
    SCALES_AT,
)
from pallas_attn._tile.rows import Chunk

type Read = Callable[[Chunk], jax.Array]
"""Elements `chunk` of a pool's last dimension, [tokens, size]."""


def read(read: Read, dtype: Any, chunks: Sequence[tuple[int, int]]) -> list[jax.Array]:
    """A tile's latents in `chunks`, then its rotary part, from a pool of `dtype`."""
    if dtype != BYTES:
        return [read(chunk) for chunk in (*chunks, (LATENT_DIM, ROPE_DIM))]
    rope = _numbers(read((ROPE_AT, 2 * ROPE_DIM)), jnp.bfloat16)
    return [*(_latents(read, first, size) for first, size in chunks), rope]


def _latents(read: Read, first: int, size: int) -> jax.Array:
    """Elements `first` to `first + size`, whole groups, in bf16; exact where scales are powers of two."""
    # Of two loads that meet Triton takes the later one's layout for what follows: by the scales', a thread would have
    # 128 elements side by side, and eight threads would wait for one another at the same banks of shared memory.
    scales = _numbers(read((SCALES_AT + 4 * (first // GROUP), 4 * (size // GROUP))), jnp.float32)
    elements = values(read((first, size)))
    latents = elements.reshape(-1, size // GROUP, GROUP) * scales[:, :, None]
    return _settled(latents.astype(jnp.bfloat16), elements.shape)


def values(tile: jax.Array) -> jax.Array:
    """Bytes of float8_e4m3fn as float32. Before sm_89, NaN is read as 480."""
    if current_device().architecture.converts_e4m3:
        return lax.bitcast_convert_type(tile, FP8).astype(jnp.float32)
    # Exponents of fp16 start 8 lower: moved into place, the bits are of a number 2**8 times too small.
    bits = tile.astype(jnp.int16)
    bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32) * np.float32(2**8)


def _settled(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The same elements in `shape`, by way of a maximum over one element.

    Triton moves a conversion to the layout of a product to before what can be computed again in that layout: up to the
    load. A tile that goes into two products would be converted twice, and its load left out of the pipeline for that.
    It does not move anything to before a reduction.

    That is so of Triton alone. XLA takes axes of one away before its own Triton, which then converts twice, and is
    the faster for it: held back there too, as `narrow.settled` does, 128 x 4096 took 344 instead of 297 us with 16
    heads and 756 instead of 549 with 64 (H200).
    """
    return jnp.max(array.reshape(*shape, 1), axis=2)


def _numbers(tile: jax.Array, dtype: Any) -> jax.Array:
    """[tokens, n * size] bytes as [tokens, n] numbers of `size` bytes."""
    size = jnp.dtype(dtype).itemsize
    kind = {2: jnp.int16, 4: jnp.int32}[size]
    split = tile.reshape(tile.shape[0], -1, size).astype(jnp.int32)
    bits = jnp.sum(split << (8 * jnp.arange(size, dtype=jnp.int32)), axis=-1, dtype=jnp.int32)
    return lax.bitcast_convert_type(bits.astype(kind), dtype)
