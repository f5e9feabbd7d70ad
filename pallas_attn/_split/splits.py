"""How sequences are cut into splits, as kernels see it: which program serves a split, and where its result goes.

A partial result is a normalised output and the parts of its lse (`softmax.Lse`), both float32:

    out [num_places, num_kv_heads, rows, dim], lse [num_places, num_kv_heads, rows, 2]

A sequence's splits have `count` consecutive places from `first` on. A sequence in one split has none: its result is
final.

Each split is a work item of the grid, and the GPU's own scheduling of programs is the work queue. First come the splits
that cuts added, each about a fair share of the work, then every sequence's first split, long ones before short ones;
unused items come last and exit at once. Both are few: whatever the lengths, fair shares add up to the programs that the
config aims at, which also bounds the cuts (`SplitKVProblem.most_cuts`).

`FairSplits` computes them from all lengths in every program: a few hundred bytes out of the L2 and a handful of
reductions are cheaper than a launch that precomputes them. `ScheduledSplits` reads them from MLA's schedule, where a
program is a part that serves several sequences.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._call.checks import fail
from pallas_attn._call.configs import FixedSplitConfig
from pallas_attn._call.sizes import ceil_div, next_power_of_2
from pallas_attn._split.problem import TO_NEAREST, SplitKVProblem
from pallas_attn._tile import triton
from pallas_attn._types import Array

# Where lengths differ, a split has at most 1 + 1/2**n fair shares, with the largest n up to this for which all splits
# still start at once and no straggler remains; if there is none, the number of splits is rounded to nearest. n = 0, two
# shares, is too much where a program fills a multiprocessor: nothing runs beside the longest.
FINEST = 4

# First splits of at least a share start first, then those of half a share, of a quarter, and all others, so that the
# last to start are short. Up to this many sequences: sorting more costs more than it gains.
MOST_ORDERED = 512

# Most splits of a sequence where their number is fixed before lengths are known.
MOST_SPLITS = 128


INT_MAX = int(np.iinfo(np.int32).max)  # tiles of a batch: their sum is an int32
COUNT_BITS = MOST_ORDERED.bit_length()  # for the sequences of a class


class Split(NamedTuple):
    """What a work item of the grid serves; all scalars."""

    seq: jax.Array
    index: jax.Array | int
    """Among the splits of the sequence."""
    count: jax.Array | int
    place: jax.Array | int
    """Place of its partial result, if the sequence has several splits."""

    def tiles(self, num_tiles: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[begin, end) of the sequence's tiles: splits are equal up to a remainder."""
        each, more = num_tiles // self.count, num_tiles % self.count

        def boundary(index):
            return index * each + jnp.minimum(index, more)

        return boundary(self.index), boundary(self.index + 1)


class Cut(NamedTuple):
    """A sequence and its partial results; with `count` below 2 there is nothing to merge."""

    seq: jax.Array
    first: jax.Array
    count: jax.Array


@runtime_checkable
class Splits(Protocol):
    """How a batch is cut, for kernels whose programs serve work items."""

    def num(self) -> jax.Array | int:
        """Number of work items in use, which come first."""
        ...

    def at(self, item: jax.Array) -> Split:
        """The split of a work item."""
        ...


@runtime_checkable
class Cuts(Protocol):
    """How a batch is cut, for the merge."""

    def cut(self, which: jax.Array) -> Cut:
        """One of the sequences that may be in several splits."""
        ...


@runtime_checkable
class CountedCuts(Cuts, Protocol):
    """Cuts whose number a kernel can compute."""

    def num_cut(self) -> jax.Array: ...


def each(splits: Splits, problem: SplitKVProblem, program: jax.Array, serve: Callable[[Split], None]) -> None:
    """Serves the split of work item `program`, and of every `num_programs`-th item after it."""

    def turn(i, carry):
        item = program + i * problem.num_programs
        # Computed inside the branch, since many items have no split.
        used = problem.num_items == problem.num_seqs or item < splits.num()
        triton.when(used)(lambda: serve(splits.at(item)))
        return carry

    if problem.num_items == problem.num_programs:
        turn(0, None)
    else:
        lax.fori_loop(0, ceil_div(splits.num() - program, problem.num_programs), turn, np.int32(0))


class WholeSplits:
    """One split for each sequence, where none can be cut."""

    def __init__(self, problem: SplitKVProblem):
        self._num_seqs = problem.num_seqs

    def num(self) -> int:
        return self._num_seqs

    def at(self, item: jax.Array) -> Split:
        return Split(item, 0, 1, 0)


def fair(problem: SplitKVProblem, seq_lens: Array) -> Splits:
    """The splits of a kernel that knows only the lengths."""
    return FairSplits.of_all(problem, seq_lens) if problem.most_cuts else WholeSplits(problem)


class FairSplits:
    """Cuts each sequence into as many equal splits as it has fair shares.

    The common case of equal lengths takes a few scalars: reductions over all lengths are a chain of shuffles, a tenth
    of a short call's time.
    """

    def __init__(self, problem: SplitKVProblem, lengths: jax.Array, first: jax.Array | None = None):
        """`lengths` [num_seqs], padded with empty sequences; `first` is the first of them, if known: whether all equal
        it takes one reduction, finding the longest would take another before it."""
        self._problem, self._lengths, self._seqs = problem, lengths, jnp.arange(len(lengths))
        num_tiles = _tiles(lengths, problem)
        one = jnp.max(num_tiles) if first is None else _tiles(first, problem)
        self._each = equal_cuts(one, problem, len(lengths))
        if problem.num_seqs == 1:
            self._even: jax.Array | bool = True
        else:
            differ = (self._seqs < problem.num_seqs) & (num_tiles != one)
            self._even = jnp.max(differ.astype(jnp.int32)) == 0
        # Not used where all lengths are equal.
        self._cuts = self._of(lambda: self._each + 0 * self._seqs, lambda: cuts(lengths, problem))

    def _of(self, even: Callable[[], Any], uneven: Callable[[], Any]) -> Any:
        return even() if self._even is True else lax.cond(self._even, even, uneven)

    @classmethod
    def of_all(cls, problem: SplitKVProblem, seq_lens: Array) -> "FairSplits":
        seqs = jnp.arange(next_power_of_2(problem.num_seqs))
        lengths = triton.load(seq_lens.at[seqs], mask=seqs < problem.num_seqs, other=0)
        return cls(problem, lengths, triton.load(seq_lens.at[np.int32(0)]))

    def num(self) -> jax.Array:
        num_seqs = self._problem.num_seqs
        return num_seqs + self._of(lambda: num_seqs * self._each, lambda: jnp.sum(self._cuts))

    def at(self, item: jax.Array) -> Split:
        if self._problem.num_seqs == 1:
            return Split(0 * item, item, self._each + 1, item)
        return self._of(lambda: self._at_even(item), lambda: self._at_uneven(item))

    def _at_even(self, item: jax.Array) -> Split:
        total = self._problem.num_seqs * self._each
        added = item // jnp.maximum(self._each, 1)
        seq = jnp.where(item < total, added, item - total)
        index = jnp.where(item < total, item - added * self._each + 1, 0)
        return Split(seq, index, self._each + 1, first_place(seq * self._each, seq) + index)

    def _at_uneven(self, item: jax.Array) -> Split:
        upto = jnp.cumsum(self._cuts)
        total, before = jnp.sum(self._cuts), upto - self._cuts

        def added():
            """For each sequence, the index of an item among those that its cuts added."""
            return jnp.where((before <= item) & (item < upto), item, -1)

        def first():
            """For each sequence, the item of its first split."""
            return total + turns(self._lengths, self._cuts, self._problem)

        if in_turn(self._problem):
            # A branch: programs that start at once need not wait for the sort.
            mine = lax.cond(item < total, added, first) == item
        else:
            mine = jnp.where(item < total, added(), total + self._seqs) == item
        seq, before, own = (jnp.sum(jnp.where(mine, x, 0)) for x in (self._seqs, before, self._cuts))
        index = jnp.where(item < total, item - before + 1, 0)
        return Split(seq, index, own + 1, first_place(before, seq) + index)

    def num_cut(self) -> jax.Array:
        """Number of sequences that are cut."""
        num_seqs = self._problem.num_seqs
        return self._of(
            lambda: num_seqs * jnp.minimum(self._each, 1), lambda: jnp.sum(jnp.minimum(self._cuts, 1))
        )

    def cut(self, which: jax.Array) -> Cut:
        return self._of(
            lambda: Cut(which, which * (self._each + 1), self._each + 1),
            lambda: self._cut_uneven(which),
        )

    def _cut_uneven(self, which: jax.Array) -> Cut:
        is_cut = self._cuts > 0
        mine = is_cut & (jnp.cumsum(is_cut.astype(jnp.int32)) == which + 1)
        values = (self._seqs, jnp.cumsum(self._cuts) - self._cuts, self._cuts)
        seq, before, own = (jnp.sum(jnp.where(mine, x, 0)) for x in values)
        return Cut(seq, first_place(before, seq), own + 1)


def equal_cuts(num_tiles: jax.Array, problem: SplitKVProblem, room: int) -> jax.Array:
    """How often each sequence is cut where all have `num_tiles`; `room` is how many lengths `cuts` would sum."""
    if problem.fixed_splits:
        return _fixed_cuts(num_tiles, problem)
    total = problem.num_seqs * jnp.minimum(num_tiles, INT_MAX // room)
    fair = _fair(total.astype(jnp.float32), problem)
    return _most(_rounded(num_tiles.astype(jnp.float32), fair, problem, problem.rounding) - 1, problem)


def cuts(lengths: jax.Array, problem: SplitKVProblem) -> jax.Array:
    """How often each sequence is cut, int32 [num_seqs], padding of length 0 included."""
    num_tiles = _tiles(lengths, problem)
    if problem.fixed_splits:
        return _fixed_cuts(num_tiles, problem)
    # Integer sums do not depend on the order: all kernels of a call must compute the same cuts.
    work = jnp.minimum(num_tiles, INT_MAX // len(lengths))
    total = jnp.sum(work).astype(jnp.float32)
    tiles, fair = num_tiles.astype(jnp.float32), _fair(total, problem)
    count = _rounded(tiles, fair, problem, TO_NEAREST)
    for n in range(int(problem.alone), FINEST + 1):
        finer = _rounded_up(tiles, (1 + 2.0**-n) * fair, problem)
        count = jnp.where(jnp.sum(finer) <= int(problem.shares), finer, count)
    return _most(count - 1, problem)


def _tiles(lengths: jax.Array, problem: SplitKVProblem) -> jax.Array:
    """Tiles of the walks over sequences of these lengths, clipped to the table."""
    return problem.num_tiles(jnp.clip(lengths, 0, problem.max_len))


def _fixed_cuts(num_tiles: jax.Array, problem: SplitKVProblem) -> jax.Array:
    return _most(ceil_div(num_tiles, problem.split_tiles) - 1, problem)


def _most(cuts: jax.Array, problem: SplitKVProblem) -> jax.Array:
    return jnp.clip(cuts, 0, problem.most_splits - 1)


def _fair(total: jax.Array, problem: SplitKVProblem) -> jax.Array:
    """A program's fair share of all tiles."""
    return total * (problem.programs_per_split / problem.config.target_programs)


def _least(problem: SplitKVProblem) -> float:
    """The fewest tiles of a split."""
    return max(problem.config.min_split_tokens / problem.config.block_kv, 1.0)


def _rounded(tiles: jax.Array, share: jax.Array, problem: SplitKVProblem, rounding: float) -> jax.Array:
    """How many shares a sequence of `tiles` tiles has."""
    return (tiles / jnp.maximum(share, _least(problem)) + rounding).astype(jnp.int32)


def _rounded_up(tiles: jax.Array, share: jax.Array, problem: SplitKVProblem) -> jax.Array:
    return jnp.ceil(tiles / jnp.maximum(share, _least(problem))).astype(jnp.int32)


def in_turn(problem: SplitKVProblem) -> bool:
    """Whether sequences start by length rather than by number."""
    return problem.ordered and not problem.fixed_splits and 2 < problem.num_seqs <= MOST_ORDERED


def turns(lengths: jax.Array, cuts: jax.Array, problem: SplitKVProblem) -> jax.Array:
    """Rank of each sequence's first split, int32 [num_seqs] with padding: by class, then by number."""
    num_tiles = _tiles(lengths, problem)
    first = ceil_div(num_tiles, cuts + 1)
    share = ceil_div(jnp.sum(num_tiles), max(1, int(problem.shares)))

    def by_class(whole, half, quarter, less):
        """The class of a first split: a share or more, half a share, a quarter, or less."""
        choice = jnp.where(4 * first >= share, quarter, less)
        return jnp.where(first >= share, whole, jnp.where(2 * first >= share, half, choice))

    # One scan counts three classes, each in its own bits; the fourth is the rest.
    one = by_class(1, 1 << COUNT_BITS, 1 << (2 * COUNT_BITS), 0).astype(jnp.int32)
    upto, total = jnp.cumsum(one), jnp.sum(one)
    index = jnp.arange(len(lengths))
    wholes, halves, quarters = _counts(upto)
    all_wholes, all_halves, all_quarters = _counts(total)
    others = index + 1 - wholes - halves - quarters
    behind_wholes, behind_halves = all_wholes + halves, all_wholes + all_halves + quarters
    return by_class(wholes, behind_wholes, behind_halves, all_wholes + all_halves + all_quarters + others) - 1


def _counts(packed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    mask = (1 << COUNT_BITS) - 1
    return packed & mask, packed >> COUNT_BITS & mask, packed >> (2 * COUNT_BITS)


def first_place(cuts_before, seq):
    """First place of a sequence that is cut, after `cuts_before` cuts in the sequences before it.

    At most min(cuts, sequences) of those before are cut, and each has one split more than cuts.
    """
    return cuts_before + jnp.minimum(cuts_before, seq)


class ScheduledSplits:
    """Places of sequence i start at 2 * (num_splits[i] - i), where num_splits[i] counts the splits before it.

    num_splits[i] - i is the number of cuts before sequence i. A sequence that is cut n - 1 times has n <= 2 * (n - 1)
    splits, so places never collide, and there are at most two for each part, however many sequences there are.
    """

    def __init__(self, num_parts: int, num_splits: Array):
        self._places, self._num_splits = scheduled_places(num_parts), num_splits

    def cut(self, which: jax.Array) -> Cut:
        return Cut(which, *self.of(which))

    def of(self, seq) -> tuple[jax.Array, jax.Array]:
        """(first, count) of a sequence's partial results."""
        begin, end = (triton.load(self._num_splits.at[i]) for i in (seq, seq + 1))
        # Clamped: whatever the schedule says, reads stay inside the array of partial results.
        first = jnp.clip(2 * (begin - seq), 0, self._places)
        return first, jnp.clip(end - begin, 0, self._places - first)

    def place(self, split: jax.Array) -> jax.Array:
        """Where a split is stored: clamped to the array, whatever the schedule says."""
        return jnp.clip(split, 0, self._places - 1)


def scheduled_places(num_parts: int) -> int:
    """The most partial results that a schedule of `num_parts` parts can produce."""
    return 2 * num_parts


def check_invariant(function: str, config: FixedSplitConfig | None, batch_invariant: bool) -> None:
    if batch_invariant and config is not None and not config.split_tokens:
        fail(function, "config", "split_tokens above 0 with batch_invariant", "0")
