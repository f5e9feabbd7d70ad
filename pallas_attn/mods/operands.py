"""What an op's operands hold of a call's mods, and what its kernels make of them."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn._call.operands import dims, operands
from pallas_attn._tile import masking, triton
from pallas_attn._tile.rows import Rows
from pallas_attn.mods.bits import Bits
from pallas_attn.mods.blocks import Lists
from pallas_attn.mods.evaluate import Read, Spread, Values, as_it_is, from_arrays, spread_tile
from pallas_attn.mods.program import BATCH, HEAD, KEY, QUERY, SCORE, VARIABLES, Program, Step

OF_QUERIES, OF_ROWS = frozenset({QUERY}), frozenset({QUERY, HEAD})
"""What tells the rows of a tile apart: where all are of one head, and where each has its own."""


@dataclasses.dataclass(frozen=True, eq=False)
class Mods:
    """A pytree: in a kernel it holds refs. Every array has a dimension at least, and bools are int8 (`stored`).

    fixed: what the score_mod captures, but for what has gradients, `captured`, an operand of its own.
    of_mask: what the mask_mod captures.
    heads, sequences: [num_kv_heads, group], over pages [num_heads], and [batch]: the numbers that they have in the
        whole call, of which a device may have a share; None where no mod asks.
    of_queries, of_keys: where there is a mask of dense tokens; heads are two dimensions, as the call's.
    bits: of the mask, for a kernel that cannot ask it.
    score, mask, block: static; what there is, and how many queries and keys are in a block of the lists.
    """

    fixed: tuple[Any, ...]
    of_mask: tuple[Any, ...]
    heads: Any
    sequences: Any
    of_queries: Lists | None
    of_keys: Lists | None
    score: Program | None
    mask: Program | None
    block: tuple[int, int]
    bits: Bits | None = None

    def dims(self) -> list[str]:
        """Of the arrays, in words. Captured ones are whole on every device."""
        words = [captured_dims(array) for array in (*self.fixed, *self.of_mask)]
        words += ["heads group" if len(self.heads.shape) == 2 else "heads"] if self.heads is not None else []
        words += ["seqs"] if self.sequences is not None else []
        for lists in (self.of_queries, self.of_keys):
            if lists is not None:
                words += [_list_dims(array) for array in lists]
        if self.bits is not None:
            words += [captured_dims(self.bits.words), _list_dims(self.bits.first)]
        return words

    @property
    def pair_bytes(self) -> int:
        """What passes through shared memory of captured arrays, for each query and key of a head."""
        return sum(size for dtype, size in self._pairs(OF_QUERIES) if not triton.loads_each(dtype))

    @property
    def reads_wide_pairs(self) -> bool:
        """Whether a float32 or int32 is read for each query and key."""
        return any(size == 4 for _, size in self._pairs(OF_QUERIES))

    @property
    def row_bytes(self) -> int:
        """What is read for each key of a row, where each row has a head of its own."""
        return sum(size for _, size in self._pairs(OF_ROWS))

    def _pairs(self, of_rows: frozenset[int]) -> list[tuple[str, int]]:
        """Dtypes, and bytes, of elements that are read for each row and key."""
        programs = [one for one in (self.score, self.mask) if one is not None]
        read = [step for program in programs for step in reads_pairs(program, of_rows)]
        return [(step.dtype, jnp.dtype(step.dtype).itemsize) for step in read]

    def of_score(self, captured: Sequence[Any]) -> list[Any]:
        """All that the score_mod captures, in order."""
        assert self.score is not None
        floats, others = iter(captured), iter(self.fixed)
        return [next(floats if is_float(one.dtype) else others) for one in self.score.captures]


jax.tree_util.register_dataclass(
    Mods,
    data_fields=["fixed", "of_mask", "heads", "sequences", "of_queries", "of_keys", "bits"],
    meta_fields=["score", "mask", "block"],
)


@operands
class WithMods:
    """Operands of an op that takes mods."""

    captured: tuple[Any, ...] | None = dims(
        lambda self: [captured_dims(x) for x in self.captured], default=None
    )
    """Of the score_mod, what has gradients."""
    mods: Mods | None = dims(lambda self: self.mods.dims(), default=None)


def reads_pairs(program: Program, of_rows: frozenset[int] = OF_QUERIES) -> list[Step]:
    """Steps that read an element for each row and key."""
    return [
        step
        for step, variables in zip(program.steps, program.variables[len(VARIABLES) :], strict=True)
        if step.capture is not None and KEY in variables and variables & of_rows
    ]


def is_float(dtype: Any) -> bool:
    return jnp.issubdtype(jnp.dtype(dtype), jnp.floating)


def captured_dims(array: Any) -> str:
    return " ".join(f"captured{i}" for i in range(len(array.shape)))


def _list_dims(array: Any) -> str:
    kinds = ("seqs", "heads", "group")
    lead = ("one" if size == 1 else kind for size, kind in zip(array.shape[:3], kinds, strict=True))
    return " ".join((*lead, "blocks", "listed")[: array.ndim])


@dataclasses.dataclass(frozen=True)
class Tile:
    """The mods over a tile, as far as its places are known. None: there is no such mod."""

    score: Values | None
    mask: Values | None

    def given(self, known: Mapping[int, Any], *, masked: bool = True) -> "Tile":
        """Where nothing is `masked`, the mask is not asked."""
        score = None if self.score is None else self.score.given(known)
        return Tile(score, self.mask.given(known) if self.mask is not None and masked else None)

    def at(self, which: int, tokens: jax.Array, length: int, *, masked: bool = True) -> "Tile":
        """Of queries or keys, of which there are `length`: those beyond, if any, are taken for the last."""
        if self.score is None and self.mask is None:
            return self
        # Where none is beyond, loads see that neighbours are neighbours.
        # Elements of pairs may be loaded ahead of what a loop reaches (`triton.load_each`).
        beyond = (masked and length % tokens.size > 0) or self._reads_pairs
        return self.given({which: jnp.minimum(tokens, length - 1) if beyond else tokens}, masked=masked)

    @property
    def _reads_pairs(self) -> bool:
        return any(reads_pairs(one.program) for one in (self.score, self.mask) if one is not None)

    def scored(self, natural: jax.Array) -> list[jax.Array]:
        """What the score_mod, or its derivative, gives: the score, and how it hangs on what it was given."""
        assert self.score is not None
        known = self.score.given({SCORE: natural})
        return [jnp.broadcast_to(known.result(i), natural.shape) for i in range(len(known.program.results))]

    def seen(self) -> jax.Array | None:
        return None if self.mask is None else self.mask.result()

    def score_of(self, natural: jax.Array) -> jax.Array:
        return self.scored(natural)[0]

    def masked(self, logits: jax.Array) -> jax.Array:
        """-inf where the mask_mod hides a key."""
        return logits if (seen := self.seen()) is None else masking.apply(logits, seen)


NOTHING = Tile(None, None)


def over_refs(
    refs: Mods | None,
    captured: Any,
    cell: Any,
    *,
    of_score: Callable[[Program], Program] = lambda score: score,
    queries_first: bool = True,
) -> Tile:
    """In a kernel, of the head that `cell` names (batch, kv_head, place). `of_score` makes another of the score_mod,
    such as its derivative."""
    if refs is None:
        return NOTHING
    score = None if refs.score is None else of_score(refs.score)
    known = {}
    if refs.heads is not None:
        known[HEAD] = triton.load(refs.heads.at[cell.kv_head, cell.place])
    if refs.sequences is not None:
        known[BATCH] = triton.load(refs.sequences.at[cell.batch])
    reads = functools.partial(from_refs, load_pairs=triton.load_each)
    return tile(refs, captured, score, reads, spread_tile(queries_first)).given(known)


def over_rows(
    refs: Mods, captured: Any, batch: jax.Array, mine: Rows, query_at: jax.Array, length: int,
    *, rows_first: bool = True,
) -> Tile:  # fmt: skip
    """In a kernel over pages, of rows `mine` of a sequence of at most `length` tokens, whose queries are at
    `query_at`."""
    known = {QUERY: jnp.clip(query_at, 0, length - 1)}
    if refs.heads is not None:
        known[HEAD] = triton.load(refs.heads.at[mine.head], mask=mine.real, other=0)
    known[BATCH] = batch if refs.sequences is None else triton.load(refs.sequences.at[batch])
    return tile(refs, captured, refs.score, from_refs, spread_tile(rows_first, OF_ROWS)).given(known)


def over_arrays(
    mods: Mods | None,
    captured: Any,
    query_at: jax.Array,
    by_row: Callable[[jax.Array], jax.Array],
    position: jax.Array,
    length: int,
    sequences: jax.Array | None = None,
) -> Tile:
    """In a reference over pages: for rows whose queries are at `query_at` [num_seqs, 1, rows, 1], and keys at
    `position`, among `length` tokens. `by_row` makes of numbers of heads those of rows; `sequences` are the numbers
    [num_seqs] of what counts as one, where they are not those of the mods."""
    if mods is None:
        return NOTHING
    known = {QUERY: jnp.clip(query_at, 0, length - 1)}
    sequences = mods.sequences if sequences is None else sequences
    if sequences is not None:
        known[BATCH] = sequences[:, None, None, None]
    if mods.heads is not None:
        known[HEAD] = by_row(mods.heads)
    return tile(mods, captured, mods.score, from_arrays, as_it_is).given(known).at(KEY, position, length)


def has_score(mods: Mods | None) -> bool:
    return mods is not None and mods.score is not None


def has_mask(mods: Mods | None) -> bool:
    return mods is not None and mods.mask is not None


def refused_by_cuda(mods: Mods | None) -> str | None:
    """Why a kernel that is compiled beforehand does not serve."""
    if mods is None:
        return None
    return "has no mask_mod" if mods.score is None else "is compiled before a score_mod is known"


def tile(
    mods: Mods, captured: Any, score: Program | None, reads: Callable[..., Read], spread: Spread
) -> Tile:
    of_score = None
    if score is not None:
        of_score = Values(score, reads(mods.of_score(captured or ())), spread)
    of_mask = None if mods.mask is None else Values(mods.mask, reads(mods.of_mask), spread)
    return Tile(of_score, of_mask)


def from_refs(refs: Sequence[Any], *, load_pairs: Callable[[Any], jax.Array] = triton.load) -> Read:
    def read(number: int, index: list[Any]) -> jax.Array:
        index = index or [jnp.int32(0)]
        shape = jnp.broadcast_shapes(*(jnp.shape(i) for i in index))
        place = refs[number].at[tuple(jnp.broadcast_to(jnp.asarray(i, jnp.int32), shape) for i in index)]
        return triton.load(place) if len(shape) < 2 else load_pairs(place)

    return read
