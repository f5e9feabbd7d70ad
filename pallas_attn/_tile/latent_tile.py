"""A tile of MLA latents in a kernel, from pools of plain elements and of 656 bytes a token.

Latent elements are keys and values at once. Plain elements are used as stored; bytes are converted to bf16 first.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._call.device import current_device
from pallas_attn._call.sizes import Chunk
from pallas_attn._tile.latents import BYTES, FP8, GROUP, LATENT_DIM, ROPE_AT, ROPE_DIM, SCALES_AT

type Read = Callable[[Chunk], jax.Array]
"""Elements `chunk` of a pool's last dimension, [tokens, size]."""


def read(read: Read, dtype: Any, chunks: Sequence[tuple[int, int]]) -> list[jax.Array]:
    """A tile's latents in `chunks`, then its rotary part, from a pool of `dtype`."""
    if dtype != BYTES:
        return [read(chunk) for chunk in (*chunks, (LATENT_DIM, ROPE_DIM))]
    rope = _numbers(read((ROPE_AT, 2 * ROPE_DIM)), jnp.bfloat16)
    return [*(_latents(read, first, size) for first, size in chunks), rope]


def _latents(read: Read, first: int, size: int) -> jax.Array:
    """Elements [first, first + size), whole groups, in bf16; exact where scales are powers of two."""
    # Where two loads meet, Triton continues in the layout of the later one. In that of the scales a thread would hold
    # 128 neighbouring elements, and eight threads would conflict in shared memory's banks.
    scales = _numbers(read((SCALES_AT + 4 * (first // GROUP), 4 * (size // GROUP))), jnp.float32)
    elements = values(read((first, size)))
    latents = elements.reshape(-1, size // GROUP, GROUP) * scales[:, :, None]
    return _settled(latents.astype(jnp.bfloat16), elements.shape)


def values(tile: jax.Array) -> jax.Array:
    """Bytes of float8_e4m3fn as float32. Before sm_89, NaN is read as 480."""
    if current_device().architecture.converts_e4m3:
        return lax.bitcast_convert_type(tile, FP8).astype(jnp.float32)
    # The exponent bias of fp16 is larger by 8: the shifted bits are a number 2**8 times too small.
    bits = tile.astype(jnp.int16)
    bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32) * np.float32(2**8)


def _settled(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The same elements in `shape`, through a maximum over one element.

    Triton hoists the conversion to a product's layout above everything that it can recompute in that layout, up to the
    load. A tile that enters two products would be converted twice, and its load would not be pipelined. It does not
    hoist above a reduction.

    This stops standalone Triton only. XLA removes axes of size one before it calls its Triton, which then converts
    twice, and faster so: with `narrow.settled`, which stops it too, 128 x 4096 took 344 instead of 297 us with 16 heads
    and 756 instead of 549 with 64 (H200).
    """
    return jnp.max(array.reshape(*shape, 1), axis=2)


def _numbers(tile: jax.Array, dtype: Any) -> jax.Array:
    """[tokens, n * size] bytes as [tokens, n] numbers of `size` bytes."""
    size = jnp.dtype(dtype).itemsize
    kind = {2: jnp.int16, 4: jnp.int32}[size]
    split = tile.reshape(tile.shape[0], -1, size).astype(jnp.int32)
    bits = jnp.sum(split << (8 * jnp.arange(size, dtype=jnp.int32)), axis=-1, dtype=jnp.int32)
    return lax.bitcast_convert_type(bits.astype(kind), dtype)
