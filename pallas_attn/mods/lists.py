"""Lists of blocks by kind, as kernels walk over them: made by counting, for a sort of so few is slow on a GPU.

Of each row of blocks it is packed into words, a bit a block, which are full, which are seen and where runs end. From
these a block finds its place, and how long its run is; one scatter brings all blocks of both sides to their places.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.sizes import ceil_div

FULL, PARTIAL, EMPTY = range(3)
BEYOND = EMPTY + 1
WORD = 32


class Lists(NamedTuple):
    """Of each block of one side, the blocks of the other: the full ones, then the partial, then the rest."""

    order: Any
    """[batch or 1, heads or 1, own blocks, other blocks]"""
    runs: Any
    """Likewise: how many blocks from here on lie side by side, so that a kernel walks over them without looking."""
    ends: Any
    """[batch or 1, heads or 1, own blocks, 2]: of the full ones and of the partial."""


def of_both_sides(kinds: jax.Array) -> tuple[Lists, Lists]:
    """Of [batch or 1, heads or 1, blocks of queries, blocks of keys]: of queries and of keys."""
    return jax.vmap(jax.vmap(_of_head))(kinds)


def _of_head(kinds: jax.Array) -> tuple[Lists, Lists]:
    shapes = kinds.shape, kinds.shape[::-1]
    if shapes[0] == shapes[1]:  # both by the same kernels
        sides = list(zip(*map(jnp.unstack, jax.vmap(_placed)(jnp.stack([kinds, kinds.T]))), strict=True))
    else:
        sides = [_placed(kinds), _placed(kinds.T)]
    place = jnp.concatenate([at.ravel() + i * kinds.size for i, (at, _, _) in enumerate(sides)])
    told = jnp.concatenate([what.reshape(-1, 2) for _, what, _ in sides])
    found = jnp.zeros_like(told).at[place].set(told, mode="promise_in_bounds", unique_indices=True)
    lists = []
    for i, (shape, (_, _, ends)) in enumerate(zip(shapes, sides, strict=True)):
        order, runs = jnp.unstack(found[i * kinds.size :][: kinds.size].reshape(*shape, 2), axis=-1)
        lists.append(Lists(order, runs, ends))
    return lists[0], lists[1]


def _placed(kinds: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For [rows, count]: each block's place in a list of all rows, [rows, count]; its number and its run, [..., 2]; and
    the lists' ends, [rows, 2]."""
    rows, count = kinds.shape
    words = ceil_div(count, WORD)
    padded = _filled(kinds, words * WORD)
    flags = padded <= FULL, padded <= PARTIAL, padded != _filled(kinds[:, 1:], words * WORD)
    bit = jnp.arange(WORD, dtype=jnp.uint32)
    bits = jnp.stack(flags).reshape(len(flags), rows, words, WORD).astype(jnp.uint32) << bit
    packed = jnp.sum(bits, axis=-1, dtype=jnp.uint32)
    number, first = jnp.arange(words + 1, dtype=jnp.int32), jnp.arange(words, dtype=jnp.int32) * WORD
    # How many full or seen ones come before each word, and before each block.
    own = lax.population_count(packed[:2]).astype(jnp.int32)
    earlier = jnp.where(number[:-1] < number[:, None], own[..., None, :], 0)
    before = jnp.sum(earlier, axis=-1, dtype=jnp.int32)
    lower = (jnp.uint32(1) << bit) - 1
    here = lax.population_count(packed[:2, ..., None] & lower).astype(jnp.int32)
    full, seen = before[..., :-1, None] + here
    full_end, seen_end = (before[i, :, -1:, None] for i in range(2))
    block, kind = first[:, None] + bit.astype(jnp.int32), padded.reshape(rows, words, WORD)
    ahead = jnp.where(kind == PARTIAL, full_end + seen - full, seen_end + block - seen)
    place = jnp.where(kind == FULL, full, ahead) + count * jnp.arange(rows, dtype=jnp.int32)[:, None, None]
    # A run's last block is in the same word, or it is the first of a later one.
    ending = packed[2]
    of_word = jnp.where(ending == 0, count, first + _lowest(ending))
    later = jnp.min(jnp.where(number[:-1] > number[:-1, None], of_word[:, None], count), axis=-1)
    at_or_behind = ending[..., None] & ~lower
    last = jnp.where(at_or_behind == 0, later[..., None], first[:, None] + _lowest(at_or_behind))
    told = jnp.stack([jnp.broadcast_to(block, last.shape), last + 1 - block], axis=-1)
    return (
        place.reshape(rows, -1)[:, :count],
        told.reshape(rows, -1, 2)[:, :count],
        jnp.moveaxis(before[..., -1], 0, -1),
    )


def _filled(kinds: jax.Array, length: int) -> jax.Array:
    return jnp.pad(kinds, ((0, 0), (0, length - kinds.shape[1])), constant_values=BEYOND)


def _lowest(bits: jax.Array) -> jax.Array:
    """Number of the lowest bit that is set."""
    return lax.population_count(~bits & (bits - 1)).astype(jnp.int32)
