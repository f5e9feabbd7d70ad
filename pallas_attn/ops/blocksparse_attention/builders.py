"""Layouts of known patterns. Each is a mask over blocks, turned into rows and columns by `from_block_mask`.

On the host everything is numpy. `from_block_mask` and `vertical_slash` also take traced arrays, whose number of blocks
is unknown when a call is compiled: there `nnz` is the capacity. A row that exceeds it gives NaN, as anything that
points outside.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_attn._call.checks import ArgumentChecker, is_traced
from pallas_attn._tile.masking import LocalStride
from pallas_attn.ops.blocksparse_attention.layout import SparseLayout, check_sizes


def from_block_mask(
    mask: Any, *, block_size: int, q_block_size: int | None = None, nnz: int | None = None
) -> SparseLayout:
    """From a mask over blocks; blocks in the future, which no query of the row sees, are left out.

    Args:
        mask: [layout_heads, num_row_blocks, blocks of keys] bool; numpy, or a JAX array, which may be traced.
        block_size, q_block_size: tokens of a block of keys and of queries; the latter defaults to the former.
        nnz: blocks to provide for in each head; None counts them, on the host.

    Raises:
        TypeError, ValueError: wrong dtypes, shapes or sizes; nnz missing for a traced mask, or too small.
    """
    check = ArgumentChecker("from_block_mask")
    q_block_size = _sizes(check, block_size, q_block_size)
    check.array("mask", mask, ("layout_heads", "num_row_blocks", "key_blocks"), [np.bool_])
    check.non_empty("mask", mask)
    if nnz is not None:
        check.count("nnz", nnz)
    elif is_traced(mask):
        check.fail("nnz", "an int for a mask that is traced", "None")
    xp: Any = jnp if is_traced(mask) else np
    heads, rows, blocks = mask.shape
    mask = xp.asarray(mask) & _causal_blocks(rows, blocks, block_size, q_block_size)
    pointers = xp.cumsum(mask.sum(axis=2), axis=1)
    pointers = xp.concatenate([xp.zeros((heads, 1), int), pointers], axis=1).astype(np.int32)
    if nnz is None:
        nnz = max(1, int(pointers[:, -1].max()))
    elif xp is np and nnz < pointers[:, -1].max():
        check.fail("nnz", f"at least {pointers[:, -1].max()} (blocks of a head)", str(nnz))
    flat = mask.reshape(heads, rows * blocks)
    # Where each live block goes; an extra place takes blocks that are not live or do not fit.
    place = xp.where(flat, xp.minimum(xp.cumsum(flat, axis=1) - 1, nnz), nnz)
    column = xp.broadcast_to(xp.arange(rows * blocks, dtype=np.int32) % blocks, flat.shape)
    head = xp.arange(heads)[:, None]
    if xp is np:
        columns = np.zeros((heads, nnz + 1), np.int32)
        columns[head, place] = column
    else:
        columns = jnp.zeros((heads, nnz + 1), jnp.int32).at[head, place].set(column)
    return SparseLayout(pointers, columns[:, :nnz], block_size, q_block_size)


def dense_causal(max_len: int, *, block_size: int, q_block_size: int | None = None) -> SparseLayout:
    """Every block up to a row's own, for all heads: dense causal attention."""
    check = ArgumentChecker("dense_causal")
    rows, blocks, q_block_size = _blocks(check, max_len, block_size, q_block_size)
    everything = np.ones((1, rows, blocks), bool)
    return from_block_mask(everything, block_size=block_size, q_block_size=q_block_size)


def sliding_window(
    window: int, max_len: int, *, block_size: int, q_block_size: int | None = None
) -> SparseLayout:
    """Every block in which some query of the row finds one of its newest `window` tokens, its own included: a window
    rounded up to blocks, for all heads."""
    check = ArgumentChecker("sliding_window")
    check.count("window", window)
    rows, blocks, q_block_size = _blocks(check, max_len, block_size, q_block_size)
    oldest = np.arange(rows) * q_block_size - (window - 1)  # first token that the row's first query sees
    last = (np.arange(blocks) + 1) * block_size - 1
    return from_block_mask((last >= oldest[:, None])[None], block_size=block_size, q_block_size=q_block_size)


def local_stride(
    pattern: LocalStride, max_len: int, *, num_heads: int, num_kv_heads: int, q_block_size: int | None = None
) -> SparseLayout:
    """The local band and vertical stride of vLLM's block-sparse attention (Phi-3-small's), as `paged_attention` has it.

    Row block i, of block b = i * q_block_size // block_size, sees block j <= b where j > b - local_blocks, or where
    (j + offset) % vert_stride == 0, with `LocalStride.offset` of the head. A pattern whose head_sliding_step is 0 is
    one for all heads. `tp_rank` and the counts of heads are those of a tensor-parallel slice.

    Raises:
        TypeError, ValueError: wrong types or sizes; q_block_size above the pattern's block_size.
    """
    check = ArgumentChecker("local_stride")
    check.instance("pattern", pattern, LocalStride)
    for name, count in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        check.count(name, count)
    check.multiple("num_heads", num_heads, "num_kv_heads", num_kv_heads)
    rows, blocks, q_block_size = _blocks(check, max_len, pattern.block_size, q_block_size)
    if q_block_size > pattern.block_size:
        check.fail(
            "q_block_size", f"at most the pattern's block_size ({pattern.block_size})", str(q_block_size)
        )
    head = np.arange(num_heads if pattern.head_sliding_step else 1)[:, None, None]
    kv_head = head // (num_heads // num_kv_heads)
    offset = pattern.offset(head, kv_head, num_heads=num_heads, num_kv_heads=num_kv_heads)
    position = np.arange(blocks) * pattern.block_size
    row_len = np.arange(rows)[:, None] * q_block_size + 1
    kept = np.broadcast_to(pattern.kept(position, row_len, offset), (len(head), rows, blocks))
    return from_block_mask(kept, block_size=pattern.block_size, q_block_size=q_block_size)


def vertical_slash(
    vertical: Any,
    slash: Any,
    max_len: int,
    *,
    block_size: int,
    q_block_size: int | None = None,
    nnz: int | None = None,
) -> SparseLayout:
    """Vertical lines and diagonals (MInference's pattern), rounded up to blocks.

    A row sees every block that holds one of its head's `vertical` tokens, or a token that lies `slash` before one of
    the row's queries. Indices are sought per prompt, so both may be traced; give `nnz` then.

    Args:
        vertical: [layout_heads, number] int32 key positions; below 0 or from max_len on: none.
        slash: [layout_heads, number] int32 distances, query position - key position; below 0: none.
        max_len, block_size, q_block_size, nnz: as of the other builders.

    Source: Jiang et al., "MInference 1.0" (2024).
    """
    check = ArgumentChecker("vertical_slash")
    rows, blocks, q_block_size = _blocks(check, max_len, block_size, q_block_size)
    check.array("vertical", vertical, ("layout_heads", "num_vertical"), [np.int32])
    check.array("slash", slash, ("layout_heads", "num_slash"), [np.int32])
    xp: Any = jnp if is_traced(vertical) or is_traced(slash) else np
    vertical, slash = xp.asarray(vertical), xp.asarray(slash)
    block = xp.arange(blocks)
    holds = (vertical >= 0) & (vertical < max_len)
    lines = ((vertical // block_size)[:, :, None] == block) & holds[:, :, None]
    mask = xp.broadcast_to(lines.any(axis=1)[:, None, :], (vertical.shape[0], rows, blocks))
    first = xp.arange(rows) * q_block_size
    # One diagonal at a time: together they would need a mask each.
    for place in range(slash.shape[1]):
        distance = slash[:, place, None, None]
        oldest = first[:, None] - distance
        newest = oldest + q_block_size - 1
        crossed = (block * block_size <= newest) & ((block + 1) * block_size > oldest)
        mask = mask | (crossed & (distance >= 0))
    return from_block_mask(mask, block_size=block_size, q_block_size=q_block_size, nnz=nnz)


def _sizes(check: ArgumentChecker, block_size: int, q_block_size: int | None) -> int:
    q_block_size = block_size if q_block_size is None else q_block_size
    check_sizes(check, block_size, q_block_size)
    return q_block_size


def _blocks(
    check: ArgumentChecker, max_len: int, block_size: int, q_block_size: int | None
) -> tuple[int, int, int]:
    """(blocks of queries, blocks of keys, q_block_size) of sequences of up to `max_len` tokens."""
    q_block_size = _sizes(check, block_size, q_block_size)
    check.count("max_len", max_len)
    rows = math.ceil(max_len / q_block_size)
    return rows, math.ceil(rows * q_block_size / block_size), q_block_size


def _causal_blocks(rows: int, blocks: int, block_size: int, q_block_size: int) -> np.ndarray:
    """[rows, blocks]: blocks of keys that begin at or before a row's last query."""
    return np.arange(blocks) * block_size < (np.arange(rows)[:, None] + 1) * q_block_size
