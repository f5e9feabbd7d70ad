"""How a sequence is cut into pieces, as kernels see it: which partial results belong to it.

A partial result is a normalised output and its base-2 lse, both float32:

    out [num_pieces, num_kv_heads, rows, dim], lse2 [num_pieces, num_kv_heads, rows]

A sequence's pieces are `count` neighbours from `first` on. A sequence in one piece leaves none: it is final at once.
Two ways to cut. `ScheduledPieces` reads it from a schedule that was made beforehand; a program is then a part that
goes through several sequences. `EqualPieces` derives it from the lengths, in every program: each piece gets about the
same number of tiles, however the lengths are distributed. That rule is evaluated by each program from all lengths (a
few hundred bytes out of L2, read while its own length is on the way), which is cheaper than a launch to precompute it.
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp

from pallas_attn._tile import triton
from pallas_attn._tile.problem import SplitKVProblem

MOST_PIECES = 128  # of a sequence, in the configs that the heuristics choose

# What `EqualPieces` adds before it rounds a sequence's number of fair shares down.
# Where several programs share a multiprocessor, one more than there is room for waits only for the first that ends.
TO_NEAREST = 0.5
# Where a program fills a multiprocessor, one more than there are multiprocessors would make the batch take twice as
# long. Rounded down, but not for an error in the last bit.
DOWN = 2.0**-10


class Pieces(Protocol):
    def of(self, seq) -> tuple[jax.Array, jax.Array]:
        """(first, count): the sequence's partial results, if count > 1."""
        ...


class EqualPieces:
    """As many equal pieces as a sequence has fair shares; those of sequence i start at i * num_splits."""

    def __init__(self, problem: SplitKVProblem, lens_ref: Any):
        self._problem, self._lens_ref = problem, lens_ref

    def tiles(self, num_tiles: jax.Array) -> jax.Array:
        """Tiles in a piece of a sequence of `num_tiles`, at least 1."""
        problem, config = self._problem, self._problem.config
        if config.num_splits == 1:
            return jnp.maximum(num_tiles, 1)
        # All lengths, padded to a power of two with 0.
        seqs = jnp.arange(triton.next_power_of_2(problem.num_seqs))
        lengths = triton.load(self._lens_ref.at[seqs], mask=seqs < problem.num_seqs, other=0)
        share = fair_share(problem.num_tiles(jnp.clip(lengths, 0, problem.max_len)), problem)
        pieces = jnp.floor(num_tiles.astype(jnp.float32) / share + problem.rounding).astype(jnp.int32)
        pieces = jnp.clip(pieces, 1, config.num_splits)
        return jnp.maximum(ceil_div(num_tiles, pieces), 1)

    def of(self, seq) -> tuple[jax.Array, jax.Array]:
        length = jnp.clip(triton.load(self._lens_ref.at[seq]), 0, self._problem.max_len)
        num_tiles = self._problem.num_tiles(length)
        return seq * self._problem.config.num_splits, ceil_div(num_tiles, self.tiles(num_tiles))


def fair_share(num_tiles: jax.Array, problem: SplitKVProblem) -> jax.Array:
    """Tiles that each of the target's programs would get if sequences could be cut anywhere: float32 scalar."""
    config = problem.config
    programs_per_tile = problem.pool.num_kv_heads * problem.q_blocks
    share = jnp.sum(num_tiles.astype(jnp.float32)) * (programs_per_tile / config.target_programs)
    return jnp.maximum(share, config.min_split_tokens / config.block_kv)


class ScheduledPieces:
    """Those of sequence i start at 2 * (num_splits[i] - i), where num_splits counts pieces.

    num_splits[i] - i is the number of cuts before sequence i. A sequence that is cut n - 1 times has n <= 2 * (n - 1)
    pieces, so slots never collide, and there are at most two for each part, however many sequences there are.
    """

    def __init__(self, num_parts: int, splits_ref: Any):
        self._room, self._splits_ref = scheduled_room(num_parts), splits_ref

    def of(self, seq) -> tuple[jax.Array, jax.Array]:
        begin, end = (triton.load(self._splits_ref.at[i]) for i in (seq, seq + 1))
        # Whatever the schedule says, the partial results read are ones there is room for.
        first = jnp.clip(2 * (begin - seq), 0, self._room)
        return first, jnp.clip(end - begin, 0, self._room - first)

    def slot(self, piece: jax.Array) -> jax.Array:
        """Where a piece is stored: inside the room, whatever the schedule says."""
        return jnp.clip(piece, 0, self._room - 1)


def scheduled_room(num_parts: int) -> int:
    """Partial results that a schedule of `num_parts` parts can ask for."""
    return 2 * num_parts


def most_pieces(wanted: int, max_len: int, min_tokens: int) -> int:
    """Pieces of a sequence to provide for: lengths are not known when a call is compiled, only what the table holds."""
    return max(1, min(wanted, max_len // min_tokens, MOST_PIECES))


def ceil_div(a, b):
    return (a + (b - 1)) // b
