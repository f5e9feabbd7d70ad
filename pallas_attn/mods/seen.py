"""Between which keys a mask lets anyone see, in one piece or two, of sequences whose lengths are known at run time:
what lies outside is not read, and its pages may be anyone's.

Told by intervals over blocks of keys, for all sequences at once, in the operations of jnp that come before a kernel: a
few bytes for each sequence, from which its programs then know their share of what is left.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn._call.sizes import ceil_div, next_power_of_2
from pallas_attn._tile import masking, triton
from pallas_attn._tile.walk import Seen
from pallas_attn.mods import intervals
from pallas_attn.mods.operands import Mods
from pallas_attn.mods.program import BATCH, HEAD, KEY, QUERY, Number

LEAST_BLOCK, MOST_BLOCKS = 16, 2048
"""Keys of a block, and blocks of a table."""


class Left(NamedTuple):
    """Of sequences in one group each, also how many tiles a kernel walks, int32 [num_seqs]: what it deals to its
    programs instead of lengths."""

    first: Any
    gap: Any
    rest: Any
    end: Any
    tiles: Any

    @classmethod
    def of(cls, seen: Seen, block_kv: int) -> "Left":
        return cls(*seen, seen.num_tiles(block_kv))

    def load(self, seq: jax.Array) -> Seen:
        """In a kernel."""
        return Seen(*(triton.load(ref.at[seq]) for ref in self[:-1]))


def of_sequences(mods: Mods, seq_lens: jax.Array, q_len: int, max_len: int, window: Any = None) -> Seen:
    """Of the newest `q_len` tokens of each sequence, as far as a window of theirs leaves keys, too."""
    lengths = jnp.clip(seq_lens, 0, max_len)
    batch = jnp.arange(len(seq_lens), dtype=jnp.int32) if mods.sequences is None else mods.sequences
    first = lengths - q_len
    found = seen(mods, batch, (first, first if q_len == 1 else lengths - 1), lengths, max_len)
    if window is None:
        return found
    begin = jnp.maximum(found.first, masking.window_start(jnp.maximum(first, 0), window))
    return found._replace(first=jnp.minimum(begin, found.end))


def seen(
    mods: Mods, batch: jax.Array, queries: tuple[jax.Array, jax.Array], lengths: jax.Array, max_len: int
) -> Seen:
    """Of groups of queries [groups]: each of sequence `batch`, from the first to the last of `queries`, which may be
    one array, over `lengths` keys, of which a table has room for `max_len`. Of more than two pieces it is all between
    the first and the last."""
    program = mods.mask
    assert program is not None
    size = max(LEAST_BLOCK, next_power_of_2(ceil_div(max_len, MOST_BLOCKS)))
    begin = jnp.arange(ceil_div(max_len, size), dtype=jnp.int32) * size
    end = jnp.minimum(begin + size, max_len)
    first, last = (jnp.clip(at, 0, max_len - 1)[:, None] for at in queries)
    known = {
        BATCH: intervals.exactly(batch[:, None]),
        QUERY: intervals.exactly(first) if queries[0] is queries[1] else intervals.Interval(first, last),
        KEY: intervals.Interval(begin, end - 1),
    }
    if mods.heads is not None:
        known[HEAD] = intervals.Interval(jnp.min(mods.heads), jnp.max(mods.heads))
    (result,) = program.results
    if isinstance(result, Number):
        may = jnp.asarray(result.value)
    else:
        # As they were captured: without a dimension, where that is so.
        arrays = [x.reshape(one.shape) for x, one in zip(mods.of_mask, program.captures, strict=True)]
        may = intervals.evaluate(program, arrays, known, {KEY: size})[result].high
    may = may & (begin < lengths[:, None])
    before = jnp.pad(may[:, :-1], ((0, 0), (1, 0)))
    first = jnp.min(jnp.where(may, begin, max_len), axis=1)
    end = jnp.minimum(jnp.max(jnp.where(may, end, 0), axis=1), lengths)
    # In two pieces, there is one gap, between the first end of a piece and the last beginning.
    gap = jnp.min(jnp.where(before & ~may, begin, max_len), axis=1)
    rest = jnp.max(jnp.where(may & ~before, begin, 0), axis=1)
    first, two = jnp.minimum(first, end), jnp.sum(may & ~before, axis=1) == 2
    gap, rest = (jnp.where(two, x, first) for x in (gap, rest))
    return Seen(first, gap, rest, end)
