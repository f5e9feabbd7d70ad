"""How the query rows of sequences laid end to end are dealt to programs, computed inside the kernel.

A block is up to `block_q` rows (tokens x heads of a group) of one sequence, so that all of it sees the same pages.
Blocks are numbered from the last one, counting only those that a launch serves: a program scans the sequences' numbers
of blocks and finds its sequence by comparing. Places without a block come last; where there may be many of them, the
previous launch has counted the blocks, and programs without one exit before the scan. Tokens after the last sequence
are padding: one more sequence, of length 0.

Plain jnp, which has no programs, gives sequence i the blocks from

    cu_q_lens[i] * group // block_q + i

on: that leaves space for the ceil(q_len * group / block_q) blocks of each sequence, and for at most one more.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._call.sizes import next_power_of_2
from pallas_attn._tile import rows, triton
from pallas_attn.ops.ragged_attention.operands import Operands

TOTAL, CUTS = "num_blocks", "cuts"
"""Operands that a launch writes for later ones."""
AT_A_TIME = 1024  # sequences whose blocks are counted in one step


class Ragged(NamedTuple):
    """The static sizes of a call's sequences."""

    num_tokens: int
    num_seqs: int
    """Capacity; how many sequences there are is known at run time."""
    group: int
    """Query heads of a KV head."""

    def places(self, block_q: int) -> int:
        """Places for blocks; about one for each sequence stays empty."""
        return self.num_tokens * self.group // block_q + self.num_seqs + 1

    def bound(self, index: Any, stored: jax.Array, num_seqs: jax.Array) -> jax.Array:
        """First token of sequence `index`, from cu_q_lens[index] as stored: clipped to the array, and what follows the
        last sequence counts as one more."""
        inside = jnp.clip(stored, 0, self.num_tokens)
        return jnp.where(index > num_seqs, self.num_tokens, jnp.where(index > 0, inside, 0))

    def num_now(self, num_seqs: jax.Array, index: jax.Array, first: jax.Array, end: jax.Array) -> jax.Array:
        """How many sequences there are, given the stored bounds [first, end) of sequences `index`. 0 if these descend,
        since it is undefined whose a token is; the first bound is ignored."""
        num_seqs = jnp.clip(num_seqs, 0, self.num_seqs)
        descends = (index > 0) & (index < num_seqs) & (end < first)
        return jnp.where(jnp.sum(descends.astype(jnp.int32)) > 0, 0, num_seqs)

    def num_of(self, cu_q_lens: jax.Array, num_seqs: jax.Array) -> jax.Array:
        """The same outside of a kernel, with num_seqs [1]."""
        return self.num_now(num_seqs[0], jnp.arange(self.num_seqs), cu_q_lens[:-1], cu_q_lens[1:])

    def first_place(self, index: Any, bound: jax.Array, block_q: int) -> jax.Array:
        return bound * self.group // block_q + index


class Block(NamedTuple):
    """Scalars, or arrays of one shape."""

    seq: jax.Array
    is_padding: jax.Array
    first_token: jax.Array
    """The sequence's first token, among all tokens."""
    q_len: jax.Array
    """Of the sequence."""
    first_row: jax.Array
    """The block's first row, among the sequence's rows."""

    def rows(self, kv_head, index: jax.Array, group: int, block_q: int) -> rows.Rows:
        """A KV head's rows, by their index in the block."""
        row = self.first_row + index
        real = (index < block_q) & (row < self.q_len * group)
        return rows.Rows(index, real, kv_head, row // group, kv_head * group + row % group)

    def first_query(self, group: int) -> jax.Array:
        """Query token of the first row."""
        return self.first_row // group

    def last_query(self, group: int, block_q: int) -> jax.Array:
        return jnp.minimum((self.first_row + block_q - 1) // group, self.q_len - 1)


class Lens:
    """The lengths of sequences, as a kernel reads them."""

    def __init__(self, ragged: Ragged, refs: Operands):
        self._ragged, self._refs = ragged, refs
        index = jnp.arange(next_power_of_2(ragged.num_seqs + 1))
        stored = self._bound_stored(index), self._bound_stored(index + 1)
        self.num_seqs = ragged.num_now(triton.load(refs.num_seqs.at[np.int32(0)]), index, *stored)

    def _bound_stored(self, index: jax.Array) -> jax.Array:
        return triton.load(self._refs.cu_q_lens.at[jnp.minimum(index, self._ragged.num_seqs)])

    def bound(self, index: jax.Array) -> jax.Array:
        return self._ragged.bound(index, self._bound_stored(index), self.num_seqs)

    def stored(self, seq: jax.Array) -> jax.Array:
        """seq_lens as stored; 0 for padding."""
        length = triton.load(self._refs.seq_lens.at[jnp.minimum(seq, self._ragged.num_seqs - 1)])
        return jnp.where(seq < self.num_seqs, length, 0)

    def first_block(self, seq: jax.Array) -> Block:
        """A sequence's first block."""
        first, end = self.bound(seq), self.bound(seq + 1)
        return Block(seq, seq >= self.num_seqs, first, jnp.maximum(end - first, 0), 0 * first)

    def count(self, num_blocks: Callable[[Block], jax.Array]) -> jax.Array:
        """Blocks of all sequences and of the padding, in a loop, by a program with few registers to spare."""
        sequences = self._ragged.num_seqs + 1
        size = min(next_power_of_2(sequences), AT_A_TIME)

        def add(i, total):
            return total + jnp.sum(num_blocks(self.first_block(i * size + jnp.arange(size))))

        return lax.fori_loop(0, -(-sequences // size), add, np.int32(0))

    def counted(self) -> jax.Array:
        """The number of blocks, counted by the previous launch."""
        assert self._refs.num_blocks is not None
        return triton.load(self._refs.num_blocks.at[np.int32(0)])

    def block_at(
        self, place: jax.Array, block_q: int, num_blocks: Callable[[Block], jax.Array]
    ) -> tuple[Block, jax.Array]:
        """The block at a place, and whether there is one. Longest first: the last rows of a prompt see most keys, so
        the last block of the last sequence is at place 0."""
        first = self.first_block(jnp.arange(next_power_of_2(self._ragged.num_seqs + 1)))
        blocks = num_blocks(first)
        total = jnp.sum(blocks)
        end = total - jnp.cumsum(blocks) + blocks
        mine = (end - blocks <= place) & (place < end)
        seq, end = (jnp.sum(jnp.where(mine, x, 0)) for x in (first.seq, end))
        block = self.first_block(seq)
        return block._replace(first_row=(end - 1 - place) * block_q), place < total
