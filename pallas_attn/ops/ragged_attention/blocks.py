"""How the query rows of sequences that lie end to end are dealt to programs, found inside the kernel.

A block is up to `block_q` rows (tokens x heads of a group) of one sequence, so all of it sees the same pages. Where a
sequence's blocks begin must be known to every program without a pass over the sequences before it, and a bound on
their number when the call is compiled. Both follow from giving sequence i the blocks from

    cu_q_lens[i] * group // block_q + i

on: between two neighbours there is always room for the ceil(q_len * group / block_q) blocks that the first needs, and
at most one too many. A program compares its number with all of these and knows its sequence. Tokens behind the last
sequence, which are padding, are one more sequence, of length 0.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn._tile.pieces import ceil_div


class Ragged(NamedTuple):
    """What is static about the sequences of a call."""

    num_tokens: int
    num_seqs: int
    """Room for sequences; how many there are is known at run time."""
    group: int
    """Query heads of a KV head."""

    def blocks(self, block_q: int) -> int:
        """Places for blocks; about one a sequence stays empty."""
        return self.num_tokens * self.group // block_q + self.num_seqs + 1

    def bound(self, index: Any, stored: jax.Array, num_seqs: jax.Array) -> jax.Array:
        """Where sequence `index` begins among the tokens, from cu_q_lens[index] as stored: what lies behind the
        last sequence counts as one more, and nothing leads outside the array."""
        inside = jnp.clip(stored, 0, self.num_tokens)
        return jnp.where(index > num_seqs, self.num_tokens, jnp.where(index > 0, inside, 0))

    def first_block(self, index: Any, bound: jax.Array, block_q: int) -> jax.Array:
        return bound * self.group // block_q + index


class Block(NamedTuple):
    """Scalars, or arrays of one shape."""

    seq: jax.Array
    is_padding: jax.Array
    first_token: jax.Array
    """Of the sequence, among all tokens."""
    q_len: jax.Array
    """Of the sequence."""
    first_row: jax.Array
    """Of the block, among the sequence's rows."""

    def first_query(self, group: int) -> jax.Array:
        """Query token of the first row."""
        return self.first_row // group

    def last_query(self, group: int, block_q: int) -> jax.Array:
        return jnp.minimum((self.first_row + block_q - 1) // group, self.q_len - 1)

    def has_rows(self, group: int) -> jax.Array:
        return self.first_row < self.q_len * group


def num_blocks(q_len: jax.Array, group: int, block_q: int) -> jax.Array:
    return ceil_div(q_len * group, block_q)
