"""Merging the splits of a sequence, for every op: out = sum_s w_s out_s with w_s = exp(lse_s - lse).

This is online softmax over splits in place of keys: a split's maximum is its logit, weighted by the sum of its weights,
and its output is its value. It is a kernel rather than XLA reductions: it reads only the splits that a sequence really
has, in a fixed order (the same bits every run), and leaves sequences in one split, which are already final, untouched
in the aliased output.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._call.pools import PoolShape
from pallas_attn._call.sizes import ceil_div, next_power_of_2, tile_side
from pallas_attn._split.result import Result, store_lse, store_out
from pallas_attn._split.splits import CountedCuts, Cut, Cuts
from pallas_attn._tile import rows, softmax, triton

# Below this number of programs, more programs are cheaper than more work in each.
ENOUGH_PROGRAMS = 2048
# Up to this number, each program has a multiprocessor to itself and reads many partial results at once.
FEW_PROGRAMS = 128
# Programs that run at once, by registers: of four warps, and of one. More would only start in later waves to find
# nothing left to do.
AT_ONCE = {4: 512, 1: 1536}
TILE_ELEMENTS = 64 * 128  # of partial output in flight in a program
# Elements that one warp holds by itself, without barriers: with Triton 3.6 that saves a tenth of a short call or more.
WARP_ELEMENTS = 32 * 128
LEAST_DIMS = 32  # 128 bytes of a partial output
MOST_ROWS = 16


@runtime_checkable
class Merged(Protocol):
    """What merging needs to know of a problem whose sequences (or other units) are cut."""

    @property
    def num_places(self) -> int: ...
    @property
    def fixed_splits(self) -> bool: ...
    @property
    def rows(self) -> int: ...
    @property
    def pool(self) -> PoolShape: ...


@dataclasses.dataclass(frozen=True)
class Tiling:
    """What a program loads per step: `splits` partial results of `dims` elements of `rows` rows, or `most_splits` for a
    sequence that has more."""

    rows: int
    dims: int
    splits: int
    most_splits: int
    num_warps: int


def tiling(num_cut: int, num_rows: int, dim: int, most_splits: int, *, counted: bool = False) -> Tiling:
    """For `num_rows` rows of each sequence, of `dim` elements.

    Long sequences have many splits, which should be loaded together; a big batch has few splits a sequence, and one
    program serves several rows, or, where only as many programs start as run at once (`counted`), one warp each row.
    """
    width, most = tile_side(dim), next_power_of_2(most_splits)
    if counted and num_cut * num_rows > AT_ONCE[4]:
        # Rows wait for others before them, so most should be done soon: they have few splits.
        many = WARP_ELEMENTS // max(width, 128)
        return Tiling(1, width, min(max(1, many // 8), most), min(many, most), num_warps=1)
    block, dims = 1, min(width, 128)

    def programs() -> int:
        return num_cut * math.ceil(num_rows / block) * (width // dims)

    while programs() > ENOUGH_PROGRAMS and block < MOST_ROWS:
        block, dims = 2 * block, min(2 * dims, width)
    whole = dims == width
    # While multiprocessors are free, narrower programs take more splits at once: every step waits for memory.
    while 2 * programs() <= FEW_PROGRAMS and block * dims * most > TILE_ELEMENTS and dims > LEAST_DIMS:
        dims //= 2
    few = programs() <= FEW_PROGRAMS
    # Many programs that hold whole rows slow each other down with more than 16 loads in flight.
    in_flight = MOST_ROWS if whole and not few else TILE_ELEMENTS // max(dims, 128)
    splits, more = min(max(1, in_flight // block), most), min(max(1, TILE_ELEMENTS // (block * dims)), most)
    # Many programs that share rows: in a short merge four warps would mostly wait at barriers.
    parts_of_a_row = block == 1 and not whole and not few
    alone = parts_of_a_row or block * dims * most <= WARP_ELEMENTS
    if alone:
        splits, more = min(splits, WARP_ELEMENTS // dims), min(more, WARP_ELEMENTS // dims)
    return Tiling(block, dims, splits, more, num_warps=1 if alone else 4)


def merge(
    outputs: Sequence[jax.Array],
    operands: Sequence[Any],
    splits_of: Callable[..., Cuts],
    *,
    name: str,
    problem: Merged,
    num_cut: int,
    most_splits: int,
    lowering: triton.Lowering,
    rows_of: Callable[..., tuple[rows.Rows, tuple[jax.Array, ...]]] | None = None,
    counted: bool = False,
    scale: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """(out, lse), in which the rows of sequences that were cut are filled in, in place, from the partial results.

    `outputs` are the kernel's: (out, lse, partial out, partial lse), or (out, lse) alone if no sequence is ever cut:
    then nothing is done. `splits_of(*refs)` finds a sequence's partial results, at most `most_splits`, from the refs of
    `operands`. `rows_of(*refs, sequence, rows numbered through all KV heads)` returns these rows and their leading
    indices in the final arrays, where sequences are not a dimension of those; a "sequence" may then be any unit that is
    cut. `counted`: `splits_of` returns `CountedCuts`, so only as many programs start as run at once. `scale` makes the
    splits' maxima natural logits.
    """
    if not problem.num_places:
        out, lse = outputs
        return out, lse
    num_rows = problem.pool.num_kv_heads * problem.rows
    dim = outputs[0].shape[-1]
    rows_of = rows_of or functools.partial(_batched, problem)
    width = tile_side(dim)
    if problem.fixed_splits:
        # The same for every batch: the order of additions must not depend on it.
        shape = Tiling(rows=1, dims=min(width, 128), splits=16, most_splits=64, num_warps=4)
    else:
        shape = tiling(num_cut, num_rows, dim, most_splits, counted=counted)
    row_blocks, dim_blocks = ceil_div(num_rows, shape.rows), width // shape.dims
    at_once = max(1, AT_ONCE[shape.num_warps] // (row_blocks * dim_blocks))
    num_programs = min(num_cut, at_once) if counted else num_cut
    out, lse = triton.kernel_call(
        functools.partial(
            _merge_kernel,
            splits_of=splits_of,
            rows_of=rows_of,
            tiling=shape,
            factor=scale * softmax.LOG2_E,
            stride=num_programs if num_programs < num_cut else None,
        ),
        *outputs,
        *operands,
        name=name,
        grid=(row_blocks, dim_blocks, num_programs),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs[:2]],
        input_output_aliases={0: 0, 1: 1},
        num_warps=shape.num_warps,
        num_stages=1,
        lowering=lowering,
    )
    return out, lse


def _merge_kernel(
    _out_in, _lse_in, partial_out_ref, partial_lse_ref, *refs,
    splits_of: Callable[..., Cuts], rows_of: Callable[..., Any], tiling: Tiling, factor: float, stride: int | None,
):  # fmt: skip
    """Merges one of the sequences that may be cut or, with a `stride`, every stride-th of those that are."""
    *operands, _, _ = refs
    row_block, dim_block, program = (triton.program_id(axis) for axis in range(3))
    cuts = splits_of(*operands)
    merge_one = functools.partial(
        _merge_one, partial_out_ref, partial_lse_ref, *refs,
        row_block=row_block, dim_block=dim_block, rows_of=rows_of, tiling=tiling, factor=factor,
    )  # fmt: skip
    if stride is None:
        merge_one(cut=cuts.cut(program))
        return
    assert isinstance(cuts, CountedCuts)

    def turn(i, carry):
        merge_one(cut=cuts.cut(program + i * stride))
        return carry

    lax.fori_loop(0, ceil_div(cuts.num_cut() - program, stride), turn, np.int32(0))


def _merge_one(
    partial_out_ref, partial_lse_ref, *refs,
    cut: Cut, row_block, dim_block, rows_of: Callable[..., Any], tiling: Tiling, factor: float,
):  # fmt: skip
    *operands, out_ref, lse_ref = refs
    seq, first, count = cut

    @triton.when(count > 1)
    def _():
        mine, leading = rows_of(*operands, seq, row_block * tiling.rows + jnp.arange(tiling.rows))
        dim = dim_block * tiling.dims + jnp.arange(tiling.dims)

        def step(at_once, i, state):
            index = i * at_once + jnp.arange(at_once)
            present = mine.real[:, None] & (index < count)[None, :]
            place = _place(first + index, mine, present.shape)
            parts = (jnp.full(present.shape, part, jnp.int32) for part in range(len(softmax.Lse._fields)))
            maximum, rest = (
                triton.load(partial_lse_ref.at[(*place, part)], mask=present, other=-jnp.inf)
                for part in parts
            )
            inside = jnp.broadcast_to(present[:, :, None], (*present.shape, tiling.dims))
            if out_ref.shape[-1] % tiling.dims:
                inside &= dim < out_ref.shape[-1]
            place = (*_place(first + index, mine, inside.shape), jnp.broadcast_to(dim, inside.shape))
            # Loaded before the weights are computed, which takes as long as the load.
            part = triton.load(partial_out_ref.at[place], mask=inside, other=0.0)
            state, weights = softmax.rescale(state, maximum, factor, rest=rest)
            return state._replace(acc=state.acc + jnp.sum(weights[:, :, None] * part, axis=1))

        start = softmax.start((tiling.rows,), tiling.dims)

        def merged(at_once: int):
            steps = functools.partial(step, at_once)
            return softmax.finish(lax.fori_loop(0, ceil_div(count, at_once), steps, start))

        # A sequence in very many splits keeps more loads in flight, which would be wasteful for others.
        few, many = tiling.splits, tiling.most_splits
        if many > few:
            out, lse = lax.cond(count > few, lambda: merged(many), lambda: merged(few))
        else:
            out, lse = merged(few)
        chunk = (dim_block * tiling.dims, tiling.dims)
        result = Result(mine, leading, [chunk], [out], lse)
        store_out(result, out_ref)
        triton.when(dim_block == 0)(lambda: store_lse(result, lse_ref))


def _batched(problem: Any, *refs_and_seq: Any) -> tuple[rows.Rows, tuple[jax.Array, ...]]:
    *_, seq, flat = refs_and_seq
    mine = problem.rows_across_heads(flat)
    return mine, rows.batched(mine, seq)


def _place(split: jax.Array, mine: rows.Rows, shape: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """Indices of partial results [rows, splits], broadcast to `shape`, whose first dimensions these are."""
    more = tuple(range(2, len(shape)))
    by_row = (jnp.expand_dims(x, (1, *more)) for x in (mine.kv_head, mine.index))
    return tuple(jnp.broadcast_to(x, shape) for x in (jnp.expand_dims(split, (0, *more)), *by_row))
