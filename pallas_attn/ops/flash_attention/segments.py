"""Packed documents: tokens with the same segment id attend to each other, and to nothing else.

Kernels visit a block's documents one at a time, so that another document's NaN never enters a product (0 * NaN is NaN).
For that, ids are replaced by ranks 0, 1, 2, ..., and a table says where each rank's tokens lie. Ranks are in order of
the ids, or where a CUDA kernel finds them, in a quarter of the time, of documents' first tokens. For contiguous
documents in order of their ids, as packing leaves them, few tiles are visited twice; any other order is correct, too.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn._call import partition, symbolic
from pallas_attn._call.operands import dims, named, operands, ready
from pallas_attn._tile import triton
from pallas_attn._types import Array
from pallas_attn.ops.flash_attention import segments_cuda


class Documents(NamedTuple):
    """The documents of the queries, or of the keys."""

    rank: Array
    """[batch, tokens] int32."""
    table: Array
    """[batch, ranks, 3] int32: the rank's first token, one past its last, and whether all in between belong to it."""


class Extent(NamedTuple):
    """Where a document's tokens lie."""

    first: jax.Array
    end: jax.Array
    solid: jax.Array


def sides(
    query_ids: jax.Array, key_ids: jax.Array, implementation: str | None = None
) -> tuple[Documents, Documents]:
    """From ids [batch, tokens] of queries and keys, any int32. If both are the same array it is processed once. Each
    device processes its own: neither sort nor scatter has a rule for operands sharded over Explicit axes.
    `implementation`: of the call; where it names another one than CUDA, CUDA finds no documents either."""
    ids = _Ids(query_ids=query_ids, key_ids=None if key_ids is query_ids else key_ids)
    results = ("batch tokens", "batch ranks bounds") * len(named(ids))
    by_cuda = implementation in (None, "cuda") and segments_cuda.serves(*jax.tree.leaves(ids))
    found = partition.run(
        "flash_attention",
        _of_ids,
        ids,
        results,
        static={"by_cuda": by_cuda},
        implementation="cuda" if by_cuda else "xla",
    )
    return Documents(*found[:2]), Documents(*found[-2:])


@operands
class _Ids:
    query_ids: Array = dims("batch tokens")
    key_ids: Array | None = dims("batch tokens", default=None)
    """None: the same."""


def sides_of_lengths(cu_lens: jax.Array, tokens: int) -> tuple[Documents, Documents]:
    """The same for sequences laid end to end, sequence i from cu_lens[i] on. Tokens outside of them see nothing: as
    queries they have another rank than as keys."""
    found = partition.run(
        "flash_attention",
        _of_lengths,
        _Bounds(cu_q_lens=cu_lens),
        ("one tokens", "one ranks bounds") * 2,
        static={"tokens": tokens},
        implementation="xla",
    )
    return Documents(*found[:2]), Documents(*found[2:])


@operands
class _Bounds:
    cu_q_lens: Array = dims("bounds")
    """All of them on every device."""


PADDING = 3
"""Ranks after the sequences': of queries before them, of queries after them, and of keys."""


def _of_lengths(bounds: _Bounds, tokens: int) -> tuple[jax.Array, ...]:
    cu_lens = bounds.cu_q_lens
    num_seqs = cu_lens.shape[0] - 1
    at = jnp.arange(tokens, dtype=jnp.int32)
    # A single kernel, whatever the number of sequences.
    seq = symbolic.searchsorted(cu_lens, at, side="right", method="scan_unrolled").astype(jnp.int32) - 1
    # Negative lengths are invalid: then no token belongs to a sequence.
    inside = jnp.where(jnp.all(cu_lens[1:] >= cu_lens[:-1]), jnp.clip(cu_lens, 0, tokens), tokens)
    first, last = inside[:1], inside[-1:]
    held = (at >= first) & (at < last)

    def table(begins: list[jax.Array], ends: list[jax.Array]) -> jax.Array:
        begin, end = (jnp.concatenate([bounds, *more]) for bounds, more in
                      ((inside[:-1], begins), (inside[1:], ends)))  # fmt: skip
        return jnp.stack([begin, end, jnp.ones_like(begin)], axis=-1)[None]

    start, end = jnp.zeros(1, jnp.int32), jnp.full(1, tokens, jnp.int32)
    of_queries = jnp.where(held, seq, jnp.where(at < first, num_seqs, num_seqs + 1))
    of_keys = jnp.where(held, seq, num_seqs + 2)
    queries = table([start, last, end], [first, end, start])
    keys = table([end] * PADDING, [start] * PADDING)
    return of_queries[None], queries, of_keys[None], keys


SIZES = "query_seq_lengths", "key_value_seq_lengths"


@operands
class _Sizes:
    query_seq_lengths: Array | None = dims("batch", default=None)
    key_value_seq_lengths: Array | None = dims("batch", default=None)
    """None: all tokens."""


def sides_of_sizes(lengths: dict[str, jax.Array], tokens: dict[str, int]) -> tuple[Documents, Documents]:
    """The same for batch entries that end in padding. `lengths`: [batch] under the names of SIZES, where not all tokens
    count. Padding sees nothing: as queries it has another rank than as keys."""
    found = partition.run(
        "flash_attention",
        _of_sizes,
        ready(_Sizes(**lengths)),
        ("batch tokens", "batch ranks bounds") * 2,
        static={"tokens": tuple(tokens[name] for name in SIZES)},
        implementation="xla",
    )
    return Documents(*found[:2]), Documents(*found[2:])


def _of_sizes(lengths: _Sizes, tokens: tuple[int, int]) -> tuple[jax.Array, ...]:
    batch = jax.tree.leaves(lengths)[0].shape[0]  # of one that is given
    found: list[jax.Array] = []
    sides = lengths.query_seq_lengths, lengths.key_value_seq_lengths
    for place, (given, most) in enumerate(zip(sides, tokens, strict=True)):
        own = jnp.full(batch, most, jnp.int32) if given is None else given
        held = jnp.clip(own, 0, most)[:, None]
        start, end = jnp.zeros_like(held), jnp.full_like(held, most)
        begins, ends = [start, end, end], [held, start, start]
        begins[1 + place], ends[1 + place] = held, end
        bounds = [jnp.concatenate(parts, axis=1) for parts in (begins, ends)]
        at = jnp.arange(most, dtype=jnp.int32)[None]
        found += [
            jnp.where(at < held, 0, 1 + place).astype(jnp.int32),
            jnp.stack([*bounds, jnp.ones_like(bounds[0])], axis=-1),
        ]
    return tuple(found)


def padding(queries: Documents) -> jax.Array:
    """[batch, tokens]: which queries of `sides_of_lengths` belong to no sequence."""
    return queries.rank >= queries.table.shape[1] - PADDING


@functools.partial(jax.jit, static_argnames="by_cuda")
def _of_ids(ids: _Ids, *, by_cuda: bool) -> tuple[jax.Array, ...]:
    """Ranks and table of each side."""
    if by_cuda:
        return segments_cuda.find(ids.query_ids, ids.key_ids)
    sides = jax.tree.leaves(ids)
    parts = tuple(side.shape[1] for side in sides)
    rows = jnp.concatenate(sides, axis=1)
    found = jax.vmap(functools.partial(_sides_of_row, parts=parts))(rows)
    return tuple(array for side in found for array in side)


def _sides_of_row(ids: jax.Array, parts: tuple[int, ...]) -> list[tuple[jax.Array, jax.Array]]:
    """Sorted by id, each side's tokens of a rank are adjacent and ascend: comparing neighbours finds its first and
    last, which are scattered to the rank's row of the table. No two go to the same place.
    """
    most = ids.shape[0]
    order = jnp.argsort(ids, stable=True).astype(jnp.int32)
    ordered = ids[order]
    other = jnp.pad(ordered[1:] != ordered[:-1], 1, constant_values=True)
    begins, ends = other[:-1], other[1:]
    rank = jnp.cumsum(begins, dtype=jnp.int32) - 1
    place = jnp.arange(most, dtype=jnp.int32)
    ranks = jnp.zeros_like(rank).at[order].set(rank, unique_indices=True)
    found, before = [], 0
    for tokens in parts:
        mine = (order >= before) & (order < before + tokens)
        beside = jnp.pad(mine, 1)
        first = mine & (begins | ~beside[:-2])
        last = mine & (ends | ~beside[2:])

        def bound(those: jax.Array, nowhere: int, before: int = before) -> jax.Array:
            """[ranks, 2]: the token, and its place in the order."""
            at = jnp.where(those, rank, most + place)  # behind the table: dropped
            values = jnp.stack([order - before, place], axis=-1)
            return (
                jnp.full((most, 2), nowhere, jnp.int32).at[at].set(values, mode="drop", unique_indices=True)
            )

        begin, end = bound(first, tokens), bound(last, -1)
        solid = end[:, 0] - begin[:, 0] == end[:, 1] - begin[:, 1]
        table = jnp.stack([begin[:, 0], end[:, 0] + 1, solid.astype(jnp.int32)], axis=-1)
        found.append((ranks[before : before + tokens], table))
        before += tokens
    return found


def extent(side: Documents | None, batch: jax.Array, rank: jax.Array) -> Extent:
    """In a kernel, of refs."""
    assert side is not None
    first, end, solid = (triton.load(side.table.at[batch, rank, jnp.int32(i)]) for i in range(3))
    return Extent(first, end, solid > 0)
