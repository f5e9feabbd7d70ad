"""Trees of draft tokens: what the newest tokens of a sequence see of each other, where that is not causal.

Speculative decoding drafts several continuations at once, in a sequence's newest q_len slots; each draft sees its
ancestors and all older tokens. Alternative drafts for one position have different slots, so windows and ALiBi use
separate positions where the caller gives them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from pallas_attn._tile import triton
from pallas_attn._tile.rows import Rows


@runtime_checkable
class Drafted(Protocol):
    """Operands that may include a tree: arrays or refs."""

    @property
    def tree_mask(self) -> Any: ...
    @property
    def query_positions(self) -> Any: ...


class Tree(NamedTuple):
    """The tree between some queries and keys; shapes broadcast to [.., queries, keys]."""

    seen: jax.Array
    key_at: jax.Array
    """A key's position for windows and ALiBi."""
    query_at: jax.Array


class Drafts(NamedTuple):
    """The drafts: the newest `count` tokens of a sequence of `seq_len`."""

    seq_len: jax.Array
    first: jax.Array
    """Slot of the oldest query token."""
    count: int | jax.Array

    def index(self, slot: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(the number of the draft in a slot, whether the slot holds one)."""
        index = slot - self.first
        return index, (index >= 0) & (index < self.count)

    def position(self, given: jax.Array) -> jax.Array:
        """Given positions, clipped to the drafts' slots, so that a window's first tile does not depend on them."""
        return jnp.clip(given, jnp.maximum(self.first, 0), self.seq_len - 1)


type Leading = Callable[[jax.Array], tuple[jax.Array, ...]]
"""Maps a sequence's query tokens to indices in the arrays of `Drafted`."""


def queries_at(refs: Drafted, drafts: Drafts, leading: Leading, mine: Rows) -> jax.Array:
    """In a kernel: the rows' positions for windows and ALiBi."""
    slot = drafts.first + mine.token
    if refs.query_positions is None:
        return slot
    asked = mine.real & (mine.token < drafts.count)
    given = triton.load(refs.query_positions.at[leading(mine.token)], mask=asked, other=0)
    return jnp.where(asked, drafts.position(given), slot)


def of_tile(refs: Drafted, drafts: Drafts, leading: Leading, mine: Rows, slot: jax.Array) -> Tree | None:
    """In a kernel: the tree between a program's rows and the keys in slots `slot` [block_kv]; None if there is none."""
    if refs.tree_mask is None:
        return None
    index, new = drafts.index(slot)
    key, query = (0 * mine.token[:, None] + index[None, :]), mine.token[:, None] + 0 * index[None, :]
    asked = mine.real[:, None] & new[None, :]
    seen = triton.load(refs.tree_mask.at[(*leading(query), key)], mask=asked, other=1) != 0
    seen &= (drafts.first + mine.token >= 0)[:, None]
    key_at = slot
    if refs.query_positions is not None:
        given = triton.load(refs.query_positions.at[leading(index)], mask=new, other=0)
        key_at = jnp.where(new, drafts.position(given), slot)
    return Tree(seen, key_at[None, :], queries_at(refs, drafts, leading, mine)[:, None])


def of_chunk(arrays: Drafted, lengths: jax.Array, group: int, slot: jax.Array) -> Tree | None:
    """In a reference: between all rows [num_seqs, 1, rows, 1] and the keys in each sequence's slots `slot`."""
    if (mask := arrays.tree_mask) is None:
        return None
    drafts = Drafts(lengths[:, None], lengths[:, None] - mask.shape[1], mask.shape[1])
    index, new = drafts.index(slot)
    within = jnp.clip(index, 0, mask.shape[1] - 1)
    seen = jnp.take_along_axis(mask != 0, within[:, None, :], axis=2) | ~new[:, None, :]
    query_at = drafts.first + jnp.arange(mask.shape[1])
    seen &= (query_at >= 0)[:, :, None]
    key_at = jnp.broadcast_to(slot, index.shape)
    if arrays.query_positions is not None:
        query_at = drafts.position(arrays.query_positions)
        key_at = jnp.where(new, jnp.take_along_axis(query_at, within, axis=1), slot)

    def by_row(x: jax.Array) -> jax.Array:
        return jnp.repeat(x, group, axis=1)[:, None]

    return Tree(by_row(seen), key_at[:, None, None, :], by_row(query_at)[..., None])
