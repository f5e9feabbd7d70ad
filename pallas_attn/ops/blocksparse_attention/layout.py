"""Which blocks of keys each block of queries sees, head by head: `SparseLayout`.

The layout is a compressed sparse row matrix over blocks, one for each head. Row i stands for the queries at positions
[i * q_block_size, (i + 1) * q_block_size) of any sequence, column j for the keys at [j * block_size, ...). Attention is
causal besides: of a block on the diagonal a query sees the tokens up to itself.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._call.checks import ArgumentChecker, fail, is_traced

FUNCTION = "SparseLayout"
MOST_TOKENS = 2**30  # of a block: positions are int32


@dataclasses.dataclass(frozen=True, eq=False)  # arrays are not compared by ==
class SparseLayout:
    """Blocks of keys that each block of queries sees; a pytree, whose arrays may be traced.

    row_pointers: [layout_heads, num_row_blocks + 1] int32; row i of a head has the columns from row_pointers[head, i]
        on and before row_pointers[head, i + 1]. layout_heads is the query heads, or 1 if all see the same.
    columns: [layout_heads, nnz] int32, blocks of keys, ascending within a row; nnz may be 0. What lies behind a head's
        last row may hold anything.
    block_size, q_block_size: tokens of a column and of a row, powers of two from 16 to 2**30.

    A layout serves sequences of up to `max_len` tokens, of any number and lengths. The builders (see builders.py) make
    valid ones; `check` says what is wrong with others.
    """

    row_pointers: Any
    columns: Any
    block_size: int = dataclasses.field(metadata={"static": True})
    q_block_size: int = dataclasses.field(metadata={"static": True})

    @property
    def sizes(self) -> tuple[int, int]:
        return self.block_size, self.q_block_size

    @property
    def layout_heads(self) -> int:
        return self.row_pointers.shape[0]

    @property
    def num_row_blocks(self) -> int:
        return self.row_pointers.shape[1] - 1

    @property
    def max_len(self) -> int:
        """Tokens of the longest sequence that the layout covers."""
        return self.num_row_blocks * self.q_block_size

    @property
    def most_diagonal(self) -> int:
        """The most blocks that reach into a row's own positions: the last ones it lists."""
        return max(1, self.q_block_size // self.block_size)

    @property
    def is_concrete(self) -> bool:
        return not any(is_traced(leaf) for leaf in jax.tree.leaves(self))

    def check(self) -> None:
        """Raises TypeError or ValueError for an invalid layout; values are checked unless they are traced."""
        check = ArgumentChecker(FUNCTION)
        check_sizes(check, *self.sizes)
        check.array("row_pointers", self.row_pointers, ("layout_heads", "rows_and_1"), [np.int32])
        if self.num_row_blocks < 1:
            check.fail("row_pointers", "at least one row", f"shape {list(self.row_pointers.shape)}")
        check.array("columns", self.columns, ("layout_heads", "nnz"), [np.int32])
        if self.is_concrete:
            self._check_values()

    def _check_values(self) -> None:
        pointers, columns = np.asarray(self.row_pointers, np.int64), np.asarray(self.columns, np.int64)
        nnz = columns.shape[1]
        wrong = _misplaced(pointers, nnz, np)
        if wrong.any():
            head, row = np.argwhere(wrong)[0]
            expected = f"0 <= pointers <= nnz ({nnz}), ascending"
            got = f"{pointers[head, row]} for head {head}, row {row}"
            fail(FUNCTION, "row_pointers", expected, got)
        for head in range(self.layout_heads):
            row, column = self._entries(head)
            inside = (column >= 0) & (column * self.block_size < (row + 1) * self.q_block_size)
            if not inside.all():
                first = int(np.argmin(inside))
                got = f"{column[first]} for head {head}, row {row[first]}"
                fail(FUNCTION, "columns", "blocks from 0 up to the row's own positions", got)
            unordered = (np.diff(row) == 0) & (np.diff(column) <= 0)
            if unordered.any():
                got = f"others for head {head}, row {row[np.argmax(unordered)]}"
                fail(FUNCTION, "columns", "ascending blocks", got)

    def with_an_entry(self) -> "SparseLayout":
        """The same layout with space for at least one entry, which gathers need."""
        if self.columns.shape[1] > 0:
            return self
        return dataclasses.replace(self, columns=np.zeros((self.layout_heads, 1), np.int32))

    def _known(self, method: str) -> None:
        """Refuses traced layouts and invalid values."""
        if not self.is_concrete:
            fail(
                f"{FUNCTION}.{method}", "self", "a layout whose arrays are known", "traced ones (inside jit)"
            )
        self.check()

    def _entries(self, head: int) -> tuple[np.ndarray, np.ndarray]:
        """(row, column) of each block that a head lists, in order."""
        # numpy from the start: inside jit, JAX operations on known arrays would give traced ones.
        pointers = np.asarray(self.row_pointers, np.int64)[head]
        row = np.repeat(np.arange(self.num_row_blocks), np.diff(pointers))
        return row, np.asarray(self.columns, np.int64)[head, pointers[0] : pointers[-1]]

    def to_block_mask(self) -> np.ndarray:
        """[layout_heads, num_row_blocks, blocks of keys] bool; of a valid layout that is not traced, or ValueError."""
        self._known("to_block_mask")
        mask = np.zeros(
            (self.layout_heads, self.num_row_blocks, math.ceil(self.max_len / self.block_size)), bool
        )
        for head in range(self.layout_heads):
            row, column = self._entries(head)
            mask[head, row, column] = True
        return mask

    def to_dense_mask(self) -> np.ndarray:
        """[layout_heads, max_len, max_len] bool: which key each query sees, causality included. As `to_block_mask`."""
        mask = np.repeat(self.to_block_mask(), self.q_block_size, axis=1)
        mask = np.repeat(mask, self.block_size, axis=2)[:, :, : self.max_len]
        return mask & np.tri(self.max_len, dtype=bool)

    def live_fraction(self) -> float:
        """Blocks seen, over those that dense causal attention sees, in all heads together. As `to_block_mask`."""
        mask = self.to_block_mask()
        end = (np.arange(mask.shape[1]) + 1) * self.q_block_size
        dense = np.arange(mask.shape[2]) * self.block_size < end[:, None]
        return float(mask.sum() / (dense.sum() * mask.shape[0]))


jax.tree_util.register_dataclass(SparseLayout)


def check_sizes(check: ArgumentChecker, block_size: Any, q_block_size: Any) -> None:
    for name, size in (("block_size", block_size), ("q_block_size", q_block_size)):
        check.count(name, size)
        if not 16 <= size <= MOST_TOKENS or size & (size - 1):
            check.fail(name, "a power of two from 16 to 2**30", str(size))


def _misplaced(pointers: Any, nnz: int, xp: Any) -> Any:
    """Which row pointers [heads, rows + 1] lie outside or are followed by a lower one; `xp` is numpy or jax.numpy."""
    return (pointers < 0) | (pointers > nnz) | (xp.diff(pointers, axis=1, append=nnz) < 0)


def rows_of(layout: SparseLayout) -> tuple[jax.Array, jax.Array]:
    """([layout_heads, num_row_blocks, blocks of keys] what rows see, [layout_heads, num_row_blocks] which rows point
    outside or do not ascend). In jnp: may be traced.

    Each row is read by its own pointers, since others may be invalid. A valid row has no more entries than there are
    blocks: that many are looked at, and one more.
    """
    nnz, rows = layout.columns.shape[1], jnp.arange(layout.num_row_blocks)
    blocks = -(-layout.max_len // layout.block_size)
    last = ((rows + 1) * layout.q_block_size - 1) // layout.block_size

    def of_head(arrays: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        pointers, columns = arrays
        begin, end = pointers[:-1], pointers[1:]
        inside = (begin >= 0) & (begin <= end) & (end <= nnz)
        begin, end = jnp.where(inside, begin, 0), jnp.where(inside, end, 0)
        entry = begin[:, None] + jnp.arange(blocks + 1)
        listed = entry < end[:, None]
        column = columns.at[entry].get(mode="fill", fill_value=-1)
        before = jnp.pad(column[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
        good = (column > before) & (column <= last[:, None])
        seen = jnp.zeros((len(rows), blocks), bool)
        seen = seen.at[rows[:, None], jnp.where(listed & good, column, blocks)].set(True, mode="drop")
        return seen, ~inside | jnp.any(listed & ~good, axis=1)

    # A head at a time: the entries take more memory than the resulting mask.
    return lax.map(of_head, (jnp.asarray(layout.row_pointers), jnp.asarray(layout.columns)))


def rows_of_entries(layout: SparseLayout) -> tuple[jax.Array, jax.Array]:
    """([layout_heads, nnz] each entry's row, whether it has one)."""
    pointers, columns = jnp.asarray(layout.row_pointers), jnp.asarray(layout.columns)
    entry = jnp.arange(columns.shape[1])
    row = jax.vmap(lambda p: jnp.searchsorted(p, entry, side="right"))(pointers).astype(jnp.int32) - 1
    return jnp.clip(row, 0, layout.num_row_blocks - 1), (row >= 0) & (row < layout.num_row_blocks)


def transposed(layout: SparseLayout) -> SparseLayout:
    """The transposed layout: rows are blocks of keys, columns the blocks of queries that see them, ascending.

    In jnp: may be traced. Columns outside are left out. If a head's row pointers do not ascend, the rows of its entries
    are undefined, and its own row pointers are all -1. It is not a layout for calls: its columns lie in the future.
    """
    row, listed = rows_of_entries(layout)
    columns = jnp.asarray(layout.columns)
    blocks = -(-layout.max_len // layout.block_size)
    column = jnp.where(listed & (columns >= 0) & (columns < blocks), columns, blocks)
    order = jnp.argsort(column, axis=1, stable=True)
    ordered, row = (jnp.take_along_axis(x, order, axis=1) for x in (column, row))
    bounds = jnp.arange(blocks + 1, dtype=jnp.int32)
    pointers = jax.vmap(lambda x: jnp.searchsorted(x, bounds, side="left"))(ordered).astype(jnp.int32)
    wrong = _misplaced(jnp.asarray(layout.row_pointers), columns.shape[1], jnp)
    pointers = jnp.where(jnp.any(wrong, axis=1, keepdims=True), -1, pointers)
    return SparseLayout(pointers, row, layout.q_block_size, layout.block_size)
