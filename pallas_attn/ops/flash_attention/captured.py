"""Gradients of the arrays that a score_mod captures: sums over queries, over keys, and along diagonals.

Each kernel recomputes the gradients of its tiles' logits, as those of queries and keys do, and sums them in the form
that forms.py asks for. A kernel runs only if some captured array is read in its form.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._call.checks import fail
from pallas_attn._call.device import current_device
from pallas_attn._tile import dense, logits, triton
from pallas_attn.mods import forms
from pallas_attn.mods import operands as mods
from pallas_attn.mods.derivative import derivatives
from pallas_attn.mods.program import KEY, QUERY, Program
from pallas_attn.ops.flash_attention import scores, walk
from pallas_attn.ops.flash_attention.backward import QueryRows, pairs_of, rows_of
from pallas_attn.ops.flash_attention.config import FlashAttentionConfig, FlashAttentionTiles, fitted
from pallas_attn.ops.flash_attention.kernel import sides
from pallas_attn.ops.flash_attention.operands import BackwardOperands, Operands
from pallas_attn.ops.flash_attention.problem import Problem

SIDE = 64  # of the tiles along diagonals


def forms_of(operands: Operands, asked: tuple[int, ...]) -> dict[int, forms.ReadForm]:
    """{number of a read in the derivatives: its form}, for the captured floating-point arrays that are `asked`."""
    assert operands.mods is not None
    assert operands.mods.score is not None
    found = derivatives(operands.mods.score)
    floats = [i for i, one in enumerate(found.program.captures) if mods.is_float(one.dtype)]
    wanted = {floats[i] for i in asked}
    result = {}
    for i, read in enumerate(found.reads):
        if read.capture not in wanted:
            continue
        form = forms.form_of(found.program, read)
        if form is None:
            fail(
                "flash_attention",
                "score_mod",
                "captured arrays with gradients to be read by head, by query, by key or by the distance of the two (or "
                "pass 'bias', or jax.lax.stop_gradient of the array)",
                f"one of shape {list(found.program.captures[read.capture].shape)} that is read by query and key",
                NotImplementedError,
            )
        result[i] = form
    return result


@functools.partial(jax.jit, static_argnames=("asked", "config", "lowering"))
def gradients(
    operands: BackwardOperands,
    *,
    asked: tuple[int, ...],
    config: FlashAttentionConfig,
    lowering: triton.Lowering = "pallas",
) -> tuple[jax.Array, ...]:
    """A float32 gradient for each of `operands.captured`; zeros for those not `asked`."""
    given, captured = operands.mods, operands.captured
    assert given is not None
    assert given.score is not None
    assert captured is not None
    problem, found, by_form = Problem.of(operands), derivatives(given.score), forms_of(operands, asked)
    sums: dict[int, jax.Array] = {}
    for form in dict.fromkeys(by_form.values()):
        reads = tuple(i for i in by_form if by_form[i] == form)
        run = _diagonals if form == "distances" else functools.partial(_along, form=form)
        sums |= zip(reads, run(operands, problem, reads, config, lowering), strict=True)
    arrays = given.of_score(captured)
    floats = [i for i, one in enumerate(found.program.captures) if mods.is_float(one.dtype)]
    whole = {
        number: jnp.zeros(array.shape, jnp.float32) for number, array in zip(floats, captured, strict=True)
    }
    for i, of_read in sums.items():
        read = found.reads[i]
        placed = forms.brought_to_places(
            found.program, read, by_form[i], of_read, given, arrays, problem.kv_len
        )
        whole[read.capture] += placed
    return tuple(whole[number] for number in floats)


def _only(reads: tuple[int, ...], score: Program) -> Program:
    """The score, its slope, and the derivatives by these reads."""
    found = derivatives(score)
    results = found.program.results
    return Program(
        found.program.steps, (*results[:2], *(results[2 + i] for i in reads)), found.program.captures
    )


def _along(
    operands: BackwardOperands,
    problem: Problem,
    reads: tuple[int, ...],
    config: FlashAttentionConfig,
    lowering: triton.Lowering,
    form: forms.ReadForm,
) -> list[jax.Array]:
    """[batch, num_kv_heads, group, q_len or kv_len] for each of the reads."""
    tiles = config.query if form == "queries" else config.key_value
    side = "query" if form == "queries" else "key"
    size = tiles.block_q if form == "queries" else tiles.block_kv
    shape = (*problem.lse_shape[:3], forms.length(form, problem.q_len, problem.kv_len))
    found = triton.kernel_call(
        functools.partial(_along_kernel, problem=problem, tiles=tiles, reads=reads, form=form),
        operands,
        name=f"pallas_attn_flash_attention_dmod_{form}",
        grid=(problem.blocks(side, size) * problem.group, problem.num_kv_heads, problem.batch),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32)] * len(reads),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        lowering=lowering,
    )
    return list(found)


def _along_kernel(
    refs: BackwardOperands,
    *sum_refs,
    problem: Problem,
    tiles: FlashAttentionTiles,
    reads: tuple[int, ...],
    form: forms.ReadForm,
):
    """A program holds queries of a head, or keys, and walks over the other side."""
    queries, keys = sides(refs, problem, tiles)
    flat, kv_head, batch = (triton.program_id(axis) for axis in range(3))
    cell = scores.Cell(batch, kv_head, flat % np.int32(problem.group))
    holds_queries = form == "queries"
    own, other = (queries, keys) if holds_queries else (keys, queries)
    band = problem.rules.band if holds_queries else problem.rules.band.transposed()
    mine = walk.looked_up(walk.block(own, batch, flat // np.int32(problem.group)), own, other, cell)
    held = _Side(refs, problem, cell, holds_queries, mine.tokens, mine.real)
    of_mods = mods.over_refs(
        refs.mods, refs.captured, cell, of_score=functools.partial(_only, reads), queries_first=holds_queries
    ).at(*held.place)

    def step(sums: tuple[jax.Array, ...], tile: walk.Tile) -> tuple[jax.Array, ...]:
        met = _Side(refs, problem, cell, not holds_queries, tile.tokens, tile.held)
        here = of_mods.at(*met.place, masked=tile.masked)
        among = [tile.held[None, :]]
        found = _contributions(refs, cell, held, met, here, tile.masked, among)
        return tuple(total + jnp.sum(one, axis=1) for total, one in zip(sums, found, strict=True))

    def sums_of(part: walk.Part) -> None:
        zeros = tuple(jnp.zeros(own.block, jnp.float32) for _ in reads)
        sums = walk.walk(mine, part, own, other, band, cell, step, zeros)
        for ref, total in zip(sum_refs, sums, strict=True):
            triton.store(dense.per_token(ref, cell, mine.tokens), total, mask=part.tokens)

    walk.parts(mine, sums_of)


class _Side:
    """A tile's queries or keys, with what gradients need for them."""

    def __init__(
        self, refs: BackwardOperands, problem: Problem, cell: scores.Cell, of_queries: bool, tokens, real
    ):
        self.tokens, self.real, self.of_queries = tokens, real, of_queries
        self.place = (QUERY, tokens, problem.q_len) if of_queries else (KEY, tokens, problem.kv_len)
        self.rows: QueryRows | None = None
        if of_queries:
            self.rows = rows_of(refs, problem, cell, tokens, real)
            self.first, self.second = self.rows.query, self.rows.d_out
        else:
            pool = dense.Stream(problem.rules.layout, cell.batch, (cell.kv_head,))
            self.first = pool.read(refs.key, tokens, real, problem.query_chunks)
            self.second = pool.read(refs.value, tokens, real, problem.value_chunks)


def _contributions(
    refs: BackwardOperands,
    cell: scores.Cell,
    held: _Side,
    met: _Side,
    here: mods.Tile,
    masked: bool,
    among: Any,
) -> list[jax.Array]:
    """[held tokens, met tokens] for each read: what each pair adds to the gradient of the element it reads."""
    rules, rows = refs.rules, held.rows or met.rows
    assert rows is not None
    by_row = np.s_[:, None] if held.of_queries else np.s_[None, :]
    places = {
        side.of_queries: side.tokens[index] for side, index in ((held, np.s_[:, None]), (met, np.s_[None, :]))
    }
    real = held.real[:, None] & met.real[None, :]
    products = logits.products(held.first, met.first, None)
    given = scores.scores(refs, cell, products, places[True], places[False], real, here)
    seen = scores.visible(rules.band, places[True], places[False], masked, among, here)
    pairs = pairs_of(given, rows, by_row, logits.products(held.second, met.second, None), seen)
    of_reads = scores.of_mods(refs, products, here)[2:]
    if seen is not None:
        of_reads = [jnp.where(seen, one, 0.0) for one in of_reads]
    return [pairs.d_logits * one.astype(jnp.float32) for one in of_reads]


def _diagonals(
    operands: BackwardOperands,
    problem: Problem,
    reads: tuple[int, ...],
    config: FlashAttentionConfig,
    lowering: triton.Lowering,
) -> list[jax.Array]:
    """[batch, num_kv_heads, group, q_len + kv_len - 1] for each of the reads."""
    itemsize, device = operands.query.dtype.itemsize, current_device()
    base = config.key_value
    side = min(SIDE, base.block_q, base.block_kv)
    tiles = FlashAttentionTiles(side, side, base.num_warps, base.num_stages)
    tiles = fitted(tiles, "bias", problem, itemsize, operands.pair_bytes, device)
    side = min(tiles.block_q, tiles.block_kv)
    tiles = FlashAttentionTiles(side, side, tiles.num_warps, tiles.num_stages)
    rows, columns = problem.blocks("query", side), problem.blocks("key", side)
    lead, count = problem.lse_shape[:3], rows + columns - 1
    shape = jax.ShapeDtypeStruct((*lead, count, side, side), jnp.float32)
    found = triton.kernel_call(
        functools.partial(_diagonal_kernel, problem=problem, tiles=tiles, reads=reads),
        operands,
        name="pallas_attn_flash_attention_dmod_distances",
        grid=(count * problem.group, problem.num_kv_heads, problem.batch),
        out_shape=[shape] * len(reads),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        lowering=lowering,
    )
    return [_skewed(sums, problem, columns) for sums in found]


def _skewed(sums: jax.Array, problem: Problem, columns: int) -> jax.Array:
    """Sums along the diagonals of tiles [..., block diagonals, side, side], by distance."""
    *lead, count, side, _ = sums.shape
    # Row r is shifted so that every column has a single distance.
    padded = jnp.pad(sums[..., ::-1], [(0, 0)] * (len(lead) + 2) + [(0, side)])
    moved = padded.reshape(*lead, count, -1)[..., : side * (2 * side - 1)].reshape(
        *lead, count, side, 2 * side - 1
    )
    by_distance = jnp.sum(moved, axis=-2)  # [..., count, 2 * side - 1]: from -(side - 1) on
    # Neighbouring block diagonals share side - 1 distances.
    parts = jnp.pad(by_distance, [(0, 0)] * (len(lead) + 1) + [(0, 1)]).reshape(*lead, count, 2, side)
    first, second = parts[..., 0, :], parts[..., 1, :]
    whole = jnp.pad(first, [(0, 0)] * len(lead) + [(0, 1), (0, 0)]) + jnp.pad(
        second, [(0, 0)] * len(lead) + [(1, 0), (0, 0)]
    )
    # Block diagonal 0 starts at the distance of the last column of tiles, minus that within a tile.
    begin = (columns * side - 1) - (problem.kv_len - 1)
    return whole.reshape(*lead, -1)[..., begin : begin + problem.q_len + problem.kv_len - 1]


def _diagonal_kernel(
    refs: BackwardOperands, *sum_refs, problem: Problem, tiles: FlashAttentionTiles, reads: tuple[int, ...]
):
    """A program sums the tiles of a block diagonal of one head."""
    side = tiles.block_q
    queries, keys = sides(refs, problem, tiles)
    flat, kv_head, batch = (triton.program_id(axis) for axis in range(3))
    group = np.int32(problem.group)
    cell = scores.Cell(batch, kv_head, flat % group)
    rows, columns = problem.blocks("query", side), problem.blocks("key", side)
    number = flat // group
    apart = number - (columns - 1)  # row minus column
    of_mods = mods.over_refs(refs.mods, refs.captured, cell, of_score=functools.partial(_only, reads))

    def step(row: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        asked, given = walk.block(queries, batch, row), walk.block(keys, batch, row - apart)
        held = _Side(refs, problem, cell, True, asked.tokens, asked.real)
        met = _Side(refs, problem, cell, False, given.tokens, given.real)
        among = [asked.real[:, None] & given.real[None, :]]
        if asked.rank is not None and given.rank is not None:
            among.append(asked.rank[:, None] == given.rank[None, :])
        here = of_mods.at(*held.place).at(*met.place)
        found = _contributions(refs, cell, held, met, here, True, among)
        return tuple(total + one for total, one in zip(sums, found, strict=True))

    zeros = tuple(jnp.zeros((side, side), jnp.float32) for _ in reads)
    begin, end = jnp.maximum(apart, 0), jnp.minimum(jnp.int32(rows), columns + apart)
    sums = lax.fori_loop(begin, end, step, zeros)
    at = jnp.arange(side)
    for ref, total in zip(sum_refs, sums, strict=True):
        lead = (jnp.broadcast_to(i, (side, side)) for i in (*cell, number))
        index = (jnp.broadcast_to(at[:, None], (side, side)), jnp.broadcast_to(at[None, :], (side, side)))
        triton.store(ref.at[(*lead, *index)], total)
