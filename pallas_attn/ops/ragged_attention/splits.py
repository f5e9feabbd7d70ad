"""How the keys of a block of query rows are cut into splits, so that few blocks with long contexts fill the device.

Decoded sequences are one block each, and dealt as in every op (`_split/splits.py`): in shares of the batch's work,
whatever the lengths.

Where sequences have many blocks, all splits of a launch have up to the same number of tiles. Programs run in waves of
as many as the device holds, so the length is chosen whose waves take the least time, the longest of equals. Every
program derives it from all lengths (a few kilobytes out of the L2), which is cheaper than a launch to precompute it.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call import sizes
from pallas_attn._call.sizes import ceil_div, next_power_of_2
from pallas_attn._split.splits import Cut, FairSplits, Splits, WholeSplits
from pallas_attn._tile import triton
from pallas_attn.ops.ragged_attention.blocks import Lens
from pallas_attn.ops.ragged_attention.operands import Operands
from pallas_attn.ops.ragged_attention.problem import Problem
from pallas_attn.ops.ragged_attention.spans import Span

# More splits must save at least this much time, to pay for merging.
WORTH_CUTTING = np.float32(1.03)


class Share(NamedTuple):
    """What a program serves."""

    kv_head: jax.Array
    block: jax.Array
    """Place of the block of query rows."""
    is_first: jax.Array
    """Whether it is the block's first split."""
    place: jax.Array
    """Place of the partial result, if the block has several splits."""
    tiles: Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array]]
    """Maps the number of tiles that the block walks to (begin, end, number of splits)."""


class Limits(NamedTuple):
    """For the splits of blocks. Those of the i-th that a launch serves start at i * most."""

    blocks: jax.Array | int
    most: jax.Array | int
    """Splits of a block."""

    @classmethod
    def of(cls, problem: Problem, lens: Lens) -> "Limits":
        most = problem.config.num_splits
        if not problem.is_counted:
            return cls(problem.most_blocks, most)
        blocks = lens.counted()
        if most > 1:
            most = jnp.clip(problem.num_items // jnp.maximum(blocks, 1), 1, most)
        return cls(blocks, most)


class RecordedCuts:
    """The numbers of splits that programs of first splits have written, for the merge."""

    def __init__(self, problem: Problem, refs: Operands):
        assert refs.cuts is not None
        self._limits, self._counts = Limits.of(problem, Lens(problem.ragged, refs)), refs.cuts

    def cut(self, which: jax.Array) -> Cut:
        """As in any `Cuts`, with blocks in place of sequences."""
        count = triton.load(self._counts.at[which])
        return Cut(which, which * self._limits.most, jnp.where(which < self._limits.blocks, count, 0))


class BlockSplits:
    """The splits of a long launch."""

    def __init__(self, problem: Problem, refs: Operands):
        self._problem = problem.with_rules(refs)
        self._lens = Lens(problem.ragged, refs)
        self._limits = Limits.of(problem, self._lens)

    def serve(self, served: Callable[[Share], None]) -> None:
        """KV heads vary slowest, so that what a head's programs read stays in the L2. Items of few blocks, and unused
        ones, come last."""
        item, kv_head = (triton.program_id(axis) for axis in range(2))
        total, most = self._limits

        # Without the branch if there are hardly fewer blocks than items: it would wait for the count.
        @triton.when(item < total * most if self._problem.is_counted else True)
        def _():
            split, place = (item // total, item % total) if self._problem.num_places else (0, item)

            def tiles(num_tiles: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
                each = self._tiles(num_tiles)
                return split * each, jnp.minimum((split + 1) * each, num_tiles), ceil_div(num_tiles, each)

            served(Share(kv_head, place, jnp.equal(split, 0), place * most + split, tiles))

    def _tiles(self, num_tiles: jax.Array) -> jax.Array:
        """Tiles in a split of a block that walks `num_tiles`, at least 1."""
        if not self._problem.num_places:
            return jnp.maximum(num_tiles, 1)
        splits = jnp.clip(ceil_div(num_tiles, self._longest()), 1, self._limits.most)
        return jnp.maximum(ceil_div(num_tiles, splits), 1)

    def _longest(self) -> jax.Array:
        """Tiles of the longest split of any block."""
        problem, config = self._problem, self._problem.config
        first = self._lens.first_block(jnp.arange(next_power_of_2(problem.num_seqs)))
        num_blocks = jnp.where(first.is_padding, 0, problem.num_blocks(first))
        in_pages, seq_len, _ = problem.lengths(self._lens, first)

        def tiles(number: jax.Array) -> jax.Array:
            block = first._replace(first_row=jnp.maximum(number, 0) * problem.rows)
            return jnp.where(num_blocks > 0, count(problem.spans(block, in_pages, seq_len)), 0)

        # A sequence's blocks see more and more of it: the one in the middle is the average.
        work = jnp.sum((num_blocks * tiles(num_blocks // 2)).astype(jnp.float32)) * problem.pool.num_kv_heads
        longest = jnp.maximum(jnp.max(tiles(num_blocks - 1)), jnp.max(tiles(0 * num_blocks)))
        splits = 1 + jnp.arange(next_power_of_2(config.num_splits))
        splits = jnp.minimum(splits, self._limits.most)
        length = ceil_div(jnp.maximum(longest, 1), splits)
        least = -(-config.min_split_tokens // config.block_kv)
        length = jnp.where(splits > 1, jnp.maximum(length, least), length).astype(jnp.float32)
        rounds = jnp.floor(work / (length * config.target_programs) + np.float32(1 - 2**-10))
        time = jnp.maximum(rounds, 1) * length
        return jnp.max(jnp.where(time <= jnp.min(time) * WORTH_CUTTING, length, 0)).astype(jnp.int32)


class DecodedSplits:
    """The splits of a short launch: sequences of one block each."""

    def __init__(self, problem: Problem, refs: Operands):
        dealt = problem.decoded
        self._splits: Splits = decoded(problem, refs) if dealt.most_cuts else WholeSplits(dealt)

    def serve(self, served: Callable[[Share], None]) -> None:
        kv_head, item = (triton.program_id(axis) for axis in range(2))

        @triton.when(item < self._splits.num())
        def _():
            split = self._splits.at(item)

            def tiles(num_tiles: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
                return *split.tiles(num_tiles), jnp.asarray(split.count)

            served(Share(kv_head, split.seq, jnp.equal(split.index, 0), jnp.asarray(split.place), tiles))


def decoded(problem: Problem, refs: Operands) -> FairSplits:
    """How the sequences of a short launch are cut."""
    problem, lens = problem.with_rules(refs), Lens(problem.ragged, refs)
    block, mine = problem.find(lens, jnp.arange(sizes.next_power_of_2(problem.num_seqs)))
    in_pages, seq_len, _ = problem.lengths(lens, block)
    return FairSplits(problem.decoded, jnp.where(mine, count(problem.spans(block, in_pages, seq_len)), 0))


def of_launch(problem: Problem) -> Callable[[Operands], BlockSplits | DecodedSplits]:
    return functools.partial(DecodedSplits if problem.is_short else BlockSplits, problem)


def count(spans: list[Span]) -> jax.Array:
    """Tiles of all spans."""
    total = spans[0].count
    for span in spans[1:]:
        total = total + span.count
    return total
