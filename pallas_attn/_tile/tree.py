"""Trees of draft tokens: what the newest tokens of a sequence see of each other, where that is not their order.

Speculative decoding drafts several continuations at once. They lie in a sequence's newest q_len slots one after the
other; each sees its ancestors and every older token. Two drafts of one place in the text have different slots, so
what counts distances, windows and ALiBi, goes by positions of their own where the caller gives them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn._tile import triton
from pallas_attn._tile.problem import SplitKVProblem
from pallas_attn._tile.rows import Rows

NAMES = ("tree_mask", "query_positions")


class Tree(NamedTuple):
    """Of some queries and keys; shapes broadcast to [.., queries, keys]."""

    seen: jax.Array
    key_at: jax.Array
    """Where windows and ALiBi take a key to be."""
    query_at: jax.Array


class Drafts(NamedTuple):
    """The newest `q_len` tokens of a sequence of `seq_len`."""

    seq_len: jax.Array
    q_len: int

    def index(self, slot: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Which of them a slot holds, and whether it holds one at all."""
        index = slot - (self.seq_len - self.q_len)
        return index, (index >= 0) & (index < self.q_len)

    def position(self, given: jax.Array) -> jax.Array:
        """Positions as rules take them. None lies before the drafts: a window's first tile does not depend on them."""
        return jnp.clip(given, jnp.maximum(self.seq_len - self.q_len, 0), self.seq_len - 1)


def of_tile(
    refs: Mapping[str, Any], problem: SplitKVProblem, seq, seq_len, mine: Rows, slot: jax.Array
) -> Tree | None:
    """In a kernel: of a program's rows and the keys in slots `slot` [block_kv]; None without a tree."""
    if "tree_mask" not in refs:
        return None
    drafts = Drafts(seq_len, problem.q_len)
    index, new = drafts.index(slot)
    key, query = (0 * mine.token[:, None] + index[None, :]), mine.token[:, None] + 0 * index[None, :]
    asked = mine.real[:, None] & new[None, :]
    seen = triton.load(refs["tree_mask"].at[seq + 0 * key, query, key], mask=asked, other=1) != 0
    query_at = seq_len - problem.q_len + mine.token
    seen &= (query_at >= 0)[:, None]
    key_at = slot
    if "query_positions" in refs:
        at = refs["query_positions"]
        key_at = jnp.where(
            new, drafts.position(triton.load(at.at[seq + 0 * index, index], mask=new, other=0)), slot
        )
        given = triton.load(at.at[seq + 0 * mine.token, mine.token], mask=mine.real, other=0)
        query_at = drafts.position(given)
    return Tree(seen, key_at[None, :], query_at[:, None])


def of_chunk(arrays: Mapping[str, jax.Array], lengths: jax.Array, group: int, slot: jax.Array) -> Tree | None:
    """In a reference: of all rows [num_seqs, 1, rows, 1] and the keys in slots `slot` [chunk] of every sequence."""
    if "tree_mask" not in arrays:
        return None
    mask = arrays["tree_mask"]
    drafts = Drafts(lengths[:, None], mask.shape[1])
    index, new = drafts.index(slot)
    within = jnp.clip(index, 0, mask.shape[1] - 1)
    seen = jnp.take_along_axis(mask != 0, within[:, None, :], axis=2) | ~new[:, None, :]
    query_at = drafts.seq_len - drafts.q_len + jnp.arange(drafts.q_len)
    seen &= (query_at >= 0)[:, :, None]
    key_at = jnp.broadcast_to(slot, index.shape)
    if "query_positions" in arrays:
        query_at = drafts.position(arrays["query_positions"])
        key_at = jnp.where(new, jnp.take_along_axis(query_at, within, axis=1), slot)

    def by_row(x: jax.Array) -> jax.Array:
        return jnp.repeat(x, group, axis=1)[:, None]

    return Tree(by_row(seen), key_at[:, None, None, :], by_row(query_at)[..., None])
