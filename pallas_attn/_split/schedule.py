"""How sequences are dealt to programs of equal work before a kernel starts: in order, and cut anywhere.

Work is counted in blocks of tokens, and starting on a sequence costs an overhead of some blocks more. Every part has
the same payload; a part ends anywhere inside a sequence and the next one goes on there.

Dealt part by part this is a loop over a hundred or more parts. Here it is a handful of vector operations instead.
Put every sequence's blocks and its overhead on one line: sequence i begins at start[i]. A part that begins at p has
spent its payload at p + payload; if that falls inside a sequence, the next part begins one overhead before it
(which is paid once more), but never before that sequence's own start:

    next(p) = max(p + payload - overhead, last start <= p + payload)

So parts advance by a constant stride, except where one "snaps" to a sequence's start. Which start the walk from
each start snaps to next, and after how many parts, is found by comparing all pairs of starts; where the k-th part
begins then follows by binary lifting over those snaps.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn._call import symbolic
from pallas_attn._call.sizes import ceil_div


class Dealt(NamedTuple):
    """Where each part begins, and how many splits each sequence has; all int32."""

    seq: jax.Array
    """[num_parts + 1] sequences; num_seqs for parts without work, and in the last row, where all work ends."""
    block: jax.Array
    """[num_parts + 1] blocks of that sequence."""
    first_split: jax.Array
    """[num_parts]: number of a part's first split within its first sequence."""
    num_splits: jax.Array
    """[num_seqs + 1]: splits of all sequences before."""


def deal(num_blocks: jax.Array, num_parts: int, overhead: int | jax.Array) -> Dealt:
    """Deals sequences of [num_seqs] int32 blocks to `num_parts` parts."""
    num_seqs = num_blocks.shape[0]
    cost = num_blocks + overhead
    start = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(cost, dtype=jnp.int32)])
    payload = jnp.maximum(ceil_div(start[-1], num_parts) + overhead, 2 * overhead)

    # Where part k begins: on the line, then as a sequence and a block in it.
    begin = _part_begins(start, payload, num_parts, overhead)
    seq = jnp.sum(begin[:, None] >= start[None, 1:], axis=1, dtype=jnp.int32)
    block = begin - start[seq]

    # A sequence has one split more than parts that begin inside it; a part's number among them counts from the
    # first part that does.
    inside = (block > 0)[:, None] & (begin[:, None] < start[None, :])
    num_splits = jnp.arange(num_seqs + 1, dtype=jnp.int32) + jnp.sum(inside[:-1], axis=0, dtype=jnp.int32)
    first_inside = jnp.sum(begin[None, :-1] <= start[seq[:-1], None], axis=1, dtype=jnp.int32)
    first_split = jnp.where(block[:-1] > 0, jnp.arange(num_parts) - first_inside + 1, 0)
    return Dealt(seq, block, first_split, num_splits)


def _part_begins(
    start: jax.Array, payload: jax.Array, num_parts: int, overhead: int | jax.Array
) -> jax.Array:
    """[num_parts + 1] positions at which the parts begin; `start` [num_seqs + 1] ends with the total."""
    num_seqs = start.shape[0] - 1
    stride = payload - overhead
    # From start j, the m-th part reaches up to start[j] + m * stride + overhead and hands over at
    # start[j] + m * stride at the earliest: it snaps to start i if that lies in between. The total is always reached.
    node = jnp.arange(num_seqs + 1, dtype=jnp.int32)
    distance = start[None, :] - start[:, None]
    parts = jnp.maximum((distance - overhead + stride - 1) // stride, 1)
    snaps = (parts * stride <= distance) | (node == num_seqs)[None, :]
    # The fewest parts, then the last start: one minimum over a combined key.
    key = parts * (num_seqs + 1) + (num_seqs - node)[None, :]
    key = jnp.min(jnp.where(snaps & (node[None, :] > node[:, None]), key, jnp.iinfo(jnp.int32).max), axis=1)
    at_end = node == num_seqs
    hop_parts = jnp.where(at_end, 1, key // (num_seqs + 1))
    hop_node = jnp.where(at_end, num_seqs, num_seqs - key % (num_seqs + 1))

    hops = [(hop_node, hop_parts)]
    most = num_parts if symbolic.is_open(num_seqs) else min(num_seqs, num_parts)
    for _ in range(most.bit_length() - 1):
        to, count = hops[-1]
        hops.append((to[to], count + count[to]))
    at = jnp.zeros(num_parts + 1, jnp.int32)
    left = jnp.arange(num_parts + 1, dtype=jnp.int32)
    for to, count in reversed(hops):
        go = count[at] <= left
        left = jnp.where(go, left - count[at], left)
        at = jnp.where(go, to[at], at)
    return jnp.minimum(start[at] + left * stride, start[-1])
