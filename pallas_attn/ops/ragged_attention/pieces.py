"""How the keys of a block of query rows are cut into pieces, so that few blocks with long contexts fill the device.

Sequences that are decoded are one block each, and dealt as in every op (`_tile/pieces.py`): shares of the batch's work,
however lengths are distributed.

Where a sequence has many blocks, all pieces of a launch have the same number of tiles, or fewer. Programs run in rounds
of as many as the device holds, so the length is the one whose rounds take the least time, and of those the longest.
Every program derives it from all lengths (a few kilobytes out of the L2): cheaper than a launch to precompute it.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._tile import triton
from pallas_attn._tile.pieces import Cut, FairPieces, Pieces, WholePieces, ceil_div
from pallas_attn.ops.ragged_attention.blocks import Lens
from pallas_attn.ops.ragged_attention.problem import Problem
from pallas_attn.ops.ragged_attention.spans import Span

# What merging costs must be gained: more pieces only for so much less time.
WORTH_CUTTING = np.float32(1.03)


class Share(NamedTuple):
    """What a program serves."""

    block: jax.Array
    """The place of the block of query rows."""
    is_first: jax.Array
    """Of the block's pieces."""
    place: jax.Array
    """Of the partial result, if the block has several."""
    tiles: Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array]]
    """Of the number that the block walks: (begin, end, whether that is all)."""


class BlockPieces:
    """Those of the i-th block that a launch serves start at i * num_splits."""

    def __init__(self, problem: Problem, lens_refs: dict[str, Any]):
        self._problem = problem.with_window(lens_refs)
        self._lens = Lens(problem.ragged, lens_refs)

    def serve(self, place: jax.Array, split: jax.Array, served: Callable[[Share], None]) -> None:
        def tiles(num_tiles: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            each = self._tiles(num_tiles)
            return split * each, jnp.minimum((split + 1) * each, num_tiles), num_tiles <= each

        served(Share(place, split == 0, place * self._problem.config.num_splits + split, tiles))

    def cut(self, which: jax.Array) -> Cut:
        """As of any `Cuts`; what is cut here is no sequence but the block at a place."""
        problem, place = self._problem, which
        block, mine = problem.find(self._lens, place)
        in_pages, seq_len, _ = problem.lengths(self._lens, block)
        num_tiles = count(problem.spans(block, in_pages, seq_len))
        pieces = jnp.where(mine, ceil_div(num_tiles, self._tiles(num_tiles)), 0)
        return Cut(place, place * problem.config.num_splits, pieces)

    def _tiles(self, num_tiles: jax.Array) -> jax.Array:
        """Tiles in a piece of a block that walks `num_tiles`, at least 1."""
        if self._problem.config.num_splits == 1:
            return jnp.maximum(num_tiles, 1)
        pieces = jnp.clip(ceil_div(num_tiles, self._longest()), 1, self._problem.config.num_splits)
        return jnp.maximum(ceil_div(num_tiles, pieces), 1)

    def _longest(self) -> jax.Array:
        """Tiles of the longest piece of any block."""
        problem, config = self._problem, self._problem.config
        first = self._lens.first_block(jnp.arange(triton.next_power_of_2(problem.num_seqs)))
        served = problem.serves(first.q_len) & ~first.is_padding
        num_blocks = jnp.where(served, problem.num_blocks(first), 0)
        in_pages, seq_len, _ = problem.lengths(self._lens, first)

        def tiles(number: jax.Array) -> jax.Array:
            block = first._replace(first_row=jnp.maximum(number, 0) * problem.rows)
            return jnp.where(served, count(problem.spans(block, in_pages, seq_len)), 0)

        # Blocks of a sequence see more and more of it: the one in the middle tells for all.
        work = jnp.sum((num_blocks * tiles(num_blocks // 2)).astype(jnp.float32)) * problem.pool.num_kv_heads
        longest = jnp.maximum(jnp.max(tiles(num_blocks - 1)), jnp.max(tiles(0 * num_blocks)))
        pieces = 1 + jnp.arange(triton.next_power_of_2(config.num_splits))
        pieces = jnp.minimum(pieces, config.num_splits)
        length = ceil_div(jnp.maximum(longest, 1), pieces)
        least = -(-config.min_split_tokens // config.block_kv)
        length = jnp.where(pieces > 1, jnp.maximum(length, least), length).astype(jnp.float32)
        rounds = jnp.floor(work / (length * config.target_programs) + np.float32(1 - 2**-10))
        time = jnp.maximum(rounds, 1) * length
        return jnp.max(jnp.where(time <= jnp.min(time) * WORTH_CUTTING, length, 0)).astype(jnp.int32)


class DecodedPieces:
    """Those of sequences in one block each."""

    def __init__(self, problem: Problem, lens_refs: dict[str, Any]):
        dealt = problem.decoded
        self._pieces: Pieces = decoded(problem, lens_refs) if dealt.most_cuts else WholePieces(dealt)

    def serve(self, slot: jax.Array, _: jax.Array, served: Callable[[Share], None]) -> None:
        @triton.when(slot < self._pieces.num())
        def _():
            piece = self._pieces.at(slot)

            def tiles(num_tiles: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
                return *piece.tiles(num_tiles), jnp.equal(piece.count, 1)

            served(Share(piece.seq, jnp.equal(piece.index, 0), jnp.asarray(piece.place), tiles))


def decoded(problem: Problem, lens_refs: dict[str, Any]) -> FairPieces:
    """How the sequences of a short launch are cut."""
    problem, lens = problem.with_window(lens_refs), Lens(problem.ragged, lens_refs)
    block, mine = problem.find(lens, jnp.arange(triton.next_power_of_2(problem.num_seqs)))
    in_pages, seq_len, _ = problem.lengths(lens, block)
    return FairPieces(problem.decoded, jnp.where(mine, count(problem.spans(block, in_pages, seq_len)), 0))


def of_launch(problem: Problem) -> Callable[[dict[str, Any]], BlockPieces | DecodedPieces]:
    return functools.partial(DecodedPieces if problem.is_short else BlockPieces, problem)


def count(spans: list[Span]) -> jax.Array:
    """Tiles of all spans."""
    total = spans[0].count
    for span in spans[1:]:
        total = total + span.count
    return total
