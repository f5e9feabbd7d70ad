"""Inputs that expose faults: shuffled tables, poison where nothing may be read, needles where nothing may be lost.

Everything is drawn and prepared in numpy; the arrays handed out have the case's dtype, and references get the same
arrays, rounding included.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from pallas_attn.ops.kv_cache.layout import PoolShape, array_shape
from pallas_attn.testing.cases import DecodeCase

GARBAGE_IDS = (2147480000, -1, -2147483648, 12345678)


@dataclasses.dataclass
class PagedInputs:
    """Arguments of one paged call, as numpy arrays (bf16 through ml_dtypes)."""

    query: np.ndarray
    key_cache: np.ndarray
    value_cache: np.ndarray
    block_tables: np.ndarray
    seq_lens: np.ndarray

    def arguments(self) -> tuple:
        return tuple(map(jnp.asarray, dataclasses.astuple(self)))


def block_tables(
    rng: np.random.Generator, seq_lens: tuple[int, ...], page_size: int, spare: int
) -> tuple[np.ndarray, int]:
    """(tables, num_pages): pages in random order, garbage ids in every unused entry."""
    used = [math.ceil(n / page_size) for n in seq_lens]
    num_pages = sum(used) + max(spare, 1)
    tables = rng.choice(GARBAGE_IDS, size=(len(seq_lens), max(*used, 1) + spare)).astype(np.int32)
    order = rng.permutation(num_pages).astype(np.int32)
    first = 0
    for seq, count in enumerate(used):
        tables[seq, :count] = order[first : first + count]
        first += count
    return tables, num_pages


def decode_inputs(case: DecodeCase, seed: int = 0) -> PagedInputs:
    """N(0, 1) queries, keys and values; NaN in every slot that no sequence owns."""
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(case.dtype)
    tables, num_pages = block_tables(rng, case.seq_lens, case.page_size, case.spare_pages)
    pool = PoolShape(num_pages, case.page_size, case.num_kv_heads, case.head_dim)
    query = rng.standard_normal((case.num_seqs, case.num_heads, case.head_dim)).astype(dtype)
    # Built as [num_pages, page_size, ...] with NaN everywhere, then filled where tokens are.
    keys = np.full((num_pages, case.page_size, case.num_kv_heads, case.head_dim), np.nan, dtype)
    values = keys.copy()
    for seq, length in enumerate(case.seq_lens):
        page, offset = token_places(tables[seq], length, case.page_size)
        size = (length, case.num_kv_heads, case.head_dim)
        keys[page, offset] = rng.standard_normal(size).astype(dtype)
        values[page, offset] = rng.standard_normal(size).astype(dtype)
    if case.layout == "HND":
        keys, values = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (keys, values))
    assert keys.shape == array_shape(pool, case.layout)
    return PagedInputs(query, keys, values, tables, np.asarray(case.seq_lens, np.int32))


def token_places(table: np.ndarray, length: int, page_size: int) -> tuple[np.ndarray, np.ndarray]:
    """(page ids, offsets) of a sequence's tokens."""
    position = np.arange(length)
    return table[position // page_size], position % page_size


def plant_needles(
    case: DecodeCase, inputs: PagedInputs, positions: dict[int, int], scale: float | None = None
) -> None:
    """Makes one token of each named sequence ({seq: position}) outweigh all its others together, for every head.

    The key is chosen so that its logit is the log-sum-exp of the others plus 0.5: the token then carries 62% of the
    weight, and an output that lost it is wrong by most of its norm, however long the sequence.
    """
    scale = case.head_dim**-0.5 if scale is None else scale
    for seq, position in positions.items():
        length = case.seq_lens[seq]
        page, offset = token_places(inputs.block_tables[seq], length, case.page_size)
        others = np.arange(length) != position
        for head in range(case.num_kv_heads):
            queries = inputs.query[seq, head * case.group : (head + 1) * case.group].astype(np.float64)
            where = (page, head, offset) if case.layout == "HND" else (page, offset, head)
            logits = queries @ inputs.key_cache[where].astype(np.float64)[others].T * scale
            peak = logits.max(axis=1, initial=-30.0)
            target = peak + np.log(np.exp(logits - peak[:, None]).sum(axis=1) + 1e-30) + 0.5
            # The least key that meets every query of the group at its target.
            needle = np.linalg.lstsq(queries, np.maximum(target, 0.5) / scale, rcond=None)[0]
            spot = tuple(i if np.isscalar(i) else i[position] for i in where)
            inputs.key_cache[spot] = needle.astype(inputs.key_cache.dtype)
