"""How sequences are cut into pieces: which partial results belong to a sequence, as both kernels see it.

Two ways. `Scheduled` reads it from the caller's schedule. `Grid` derives it from the lengths, in every program:
each piece gets about the same number of tokens, so that the batch fills the device whatever the lengths are.
"""

from typing import Protocol

import jax
import jax.numpy as jnp

from pallas_attn._tile import schedule as grid_rule
from pallas_attn._tile import triton
from pallas_attn.ops.mla_decode.problem import Problem

ROUNDING = 2.0**-10


class Pieces(Protocol):
    def of(self, seq) -> tuple[jax.Array, jax.Array]:
        """(first, count): the sequence's partial results, if count > 1."""
        ...


class Grid:
    """Equal pieces of each sequence, as many as it has fair shares; those of sequence i start at i * num_splits."""

    def __init__(self, problem: Problem, lens_ref):
        self._problem, self._lens_ref = problem, lens_ref

    def length(self, seq) -> jax.Array:
        return jnp.clip(triton.load(self._lens_ref.at[seq]), 0, self._problem.max_len)

    def tokens(self, seq) -> jax.Array | int:
        """Tokens in a piece of this sequence."""
        problem = self._problem
        if problem.config.num_splits == 1:
            return problem.max_len
        block_kv = problem.config.block_kv
        lengths = grid_rule.load_lengths(self._lens_ref, num_seqs=problem.num_seqs, max_len=problem.max_len)
        share = grid_rule.fair_share(
            grid_rule.ceil_div(lengths, block_kv),
            programs_per_tile=problem.pool.num_kv_heads * problem.q_blocks,
            config=problem.config,
        )
        num_tiles = grid_rule.ceil_div(self.length(seq), block_kv)
        # Rounded down, unlike paged attention's: a program fills a multiprocessor, and one more than there are
        # multiprocessors would make the batch take twice as long. But not for an error in the last bit.
        splits = jnp.floor(num_tiles.astype(jnp.float32) / share + ROUNDING).astype(jnp.int32)
        splits = jnp.clip(splits, 1, problem.config.num_splits)
        return jnp.maximum(grid_rule.ceil_div(num_tiles, splits), 1) * block_kv

    def of(self, seq) -> tuple[jax.Array, jax.Array]:
        count = grid_rule.ceil_div(self.length(seq), self.tokens(seq))
        return seq * self._problem.config.num_splits, count


class Scheduled:
    def __init__(self, problem: Problem, splits_ref):
        self._problem, self._splits_ref = problem, splits_ref

    def of(self, seq) -> tuple[jax.Array, jax.Array]:
        first, end = (triton.load(self._splits_ref.at[i]) for i in (seq, seq + 1))
        # Whatever the schedule says, the partial results read are ones there is room for.
        first = jnp.clip(first, 0, self._problem.num_pieces)
        return first, jnp.clip(end, first, self._problem.num_pieces) - first
