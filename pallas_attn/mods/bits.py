"""Pairs of a mask's blocks: what its program says of them, and as a bit each, for kernels that cannot ask it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn._call import sharding
from pallas_attn._call.sizes import ceil_div
from pallas_attn.mods.evaluate import evaluate
from pallas_attn.mods.program import BATCH, HEAD, KEY, QUERY, Program

TOGETHER = 2**23
"""Pairs that are looked at in one step: a loop's next one waits for the host."""
SIDE, THREADS, WORD = 64, 128, 32
"""A warpgroup holds scores of 64 queries and 64 keys, so many of them a thread."""


class Sizes(NamedTuple):
    batch: int
    num_heads: int
    q_len: int
    kv_len: int
    block_q: int
    block_kv: int

    @property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip((BATCH, HEAD, QUERY, KEY), self[:4], strict=True))

    @property
    def together(self) -> int:
        """Blocks that are looked at in one step."""
        return max(TOGETHER // (self.block_q * self.block_kv), 1)


class Bits(NamedTuple):
    """Of the blocks that a mask leaves in part, in the order of its lists of queries."""

    words: Any
    """[max_partial, block_q / 64, block_kv / 64, 128] int32: a thread's scores of 64 x 64."""
    first: Any
    """[batch or 1, heads or 1, blocks of queries] int32: how many such blocks come before each list's."""


def seen_in_blocks(
    program: Program,
    arrays: tuple[jax.Array, ...],
    sizes: Sizes,
    shape: tuple[int, ...],
    places: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """([count, block_q, block_kv] which pairs meet, which of them there are) of blocks by their places in an array of
    `shape`, [batch or 1, heads or 1, blocks of queries, blocks of keys]."""
    query = jnp.arange(sizes.block_q, dtype=jnp.int32)[:, None]
    key = jnp.arange(sizes.block_kv, dtype=jnp.int32)[None, :]
    batch, head, row, column = (x.astype(jnp.int32)[:, None, None] for x in jnp.unravel_index(places, shape))
    query_at, key_at = row * sizes.block_q + query, column * sizes.block_kv + key
    real = (query_at < sizes.q_len) & (key_at < sizes.kv_len)
    known = {
        BATCH: batch,
        HEAD: head,
        QUERY: jnp.minimum(query_at, sizes.q_len - 1),
        KEY: jnp.minimum(key_at, sizes.kv_len - 1),
    }
    (seen,) = evaluate(program, arrays, known)
    return jnp.broadcast_to(seen, real.shape), real


def of_partial(
    program: Program, arrays: tuple[jax.Array, ...], sizes: Sizes, partial: jax.Array, most: int
) -> Bits:
    """Of the first `most` blocks of [batch or 1, heads or 1, blocks of queries, blocks of keys] that are `partial`."""
    most = min(most, partial.size)
    together = min(sizes.together, most)
    size = ceil_div(most, together) * together
    places, counts = places_of(partial, size)
    of_rows = jnp.sum(partial, axis=-1, dtype=jnp.int32)
    first = counts.reshape(partial.shape)[..., -1] - of_rows

    def some(i: jax.Array | int) -> jax.Array:
        here = lax.dynamic_slice_in_dim(places, i * together, together)
        seen, real = seen_in_blocks(program, arrays, sizes, partial.shape, here)
        return packed(seen & real)

    if size == together:
        return Bits(some(0)[:most], first)
    words = jnp.zeros((size, sizes.block_q // SIDE, sizes.block_kv // SIDE, THREADS), jnp.int32)
    words = lax.fori_loop(
        0,
        ceil_div(jnp.minimum(counts[-1], most), together),
        lambda i, words: lax.dynamic_update_slice_in_dim(words, some(i), i * together, axis=0),
        sharding.vary(words, sharding.varying_axes(partial, arrays)),
    )
    return Bits(words[:most], first)


def places_of(flags: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """(the places of the first `size` flags that are set, the last place of all where there are fewer; how many are set
    up to each)."""
    flags = flags.ravel()
    counts = jnp.cumsum(flags, dtype=jnp.int32)
    beyond = jnp.where(flags, counts - 1, flags.size + size)
    places = jnp.full(size, flags.size - 1, jnp.int32)
    return places.at[beyond].set(jnp.arange(flags.size, dtype=jnp.int32), mode="drop"), counts


def packed(seen: jax.Array) -> jax.Array:
    """[count, queries, keys] as words [count, queries / 64, keys / 64, 128], a bit for each of a thread's scores."""
    count, queries, keys = seen.shape
    # A row: of a warp, upper or lower, of a quad; a column: one of eight, of a lane in the quad, left or right.
    parts = seen.reshape(count, queries // SIDE, 4, 2, 8, keys // SIDE, 8, 4, 2)
    by_thread = parts.transpose(0, 1, 5, 2, 4, 7, 6, 3, 8)
    bits = by_thread.reshape(count, queries // SIDE, keys // SIDE, THREADS, WORD).astype(jnp.uint32)
    words = jnp.sum(bits << jnp.arange(WORD, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)
    return lax.bitcast_convert_type(words, jnp.int32)
