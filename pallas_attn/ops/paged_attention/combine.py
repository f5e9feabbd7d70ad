"""Merging the splits of a sequence: out = sum_s w_s out_s with w_s = exp(lse_s - lse).

A kernel of its own rather than XLA reductions: it reads only the splits a sequence really has, in a fixed order
(same bits every run), and leaves sequences in one split, which are already final, untouched in the aliased output.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn._tile import schedule, softmax, triton
from pallas_attn.ops.paged_attention.problem import Problem

MOST_ROWS = 16  # output rows of a program
ENOUGH_PROGRAMS = 512
# Few programs have a multiprocessor each and read many partial results at once; more would get in each other's way.
FEW_PROGRAMS = 128
WARPS, PARTIALS_PER_STEP = (4, 8), (16, 64)


def combine_splits(
    out, lse, partial, seq_lens, *, problem: Problem, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Fills the rows of `out` and `lse` whose sequences were split, in place, from `partial` (out, lse2)."""
    columns = problem.q_len * problem.num_heads
    block = MOST_ROWS
    while block > 1 and problem.num_seqs * math.ceil(columns / block) < ENOUGH_PROGRAMS:
        block //= 2
    grid = (math.ceil(columns / block), problem.num_seqs)
    few = math.prod(grid) <= FEW_PROGRAMS
    return triton.kernel_call(
        functools.partial(_combine_kernel, problem=problem, block=block, partials=PARTIALS_PER_STEP[few]),
        out,
        lse,
        *partial,
        seq_lens,
        name="pallas_attn_paged_attention_combine",
        grid=grid,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (out, lse)],
        input_output_aliases={0: 0, 1: 1},
        num_warps=WARPS[few],
        num_stages=1,
        interpret=interpret,
    )


def _combine_kernel(
    _out_in,
    _lse_in,
    partial_out_ref,
    partial_lse_ref,
    lens_ref,
    out_ref,
    lse_ref,
    *,
    problem: Problem,
    block: int,
    partials: int,
):
    """Merges the splits of `block` output rows of a sequence, `partials` rows of them at once."""
    column_block, seq = triton.program_id(0), triton.program_id(1)
    column = column_block * block + jnp.arange(block)
    real = column < problem.q_len * problem.num_heads
    dim = jnp.arange(triton.tile_side(problem.pool.head_dim))
    inside = real[:, None] & (dim < problem.pool.head_dim)[None, :]
    splits = jnp.arange(triton.next_power_of_2(problem.config.num_splits))
    at_once = min(partials // block, len(splits))

    def load_lse2(split, present):
        """[splits, block]; -inf for splits that are not `present`."""
        tile = jnp.zeros((split.shape[0], block), jnp.int32)
        place = partial_lse_ref.at[split[:, None] + tile, seq + tile, column[None, :] + tile]
        return triton.load(place, mask=present[:, None] & real[None, :], other=-jnp.inf)

    def load_partial(step):
        """(out [splits, block, dims], lse2 [splits, block]) of the step's splits."""
        split = step * at_once + jnp.arange(at_once)
        present = (split < used)[:, None, None] & inside
        tile = jnp.zeros(present.shape, jnp.int32)
        place = (split[:, None, None] + tile, seq + tile, column[:, None] + tile, dim + tile)
        out = triton.load(partial_out_ref.at[place], mask=present, other=0.0)
        return out, load_lse2(split, split < used)

    # What is on its way together costs one wait: lse is read with the length that says how much of it counts, and
    # the first partial results before their weights are known.
    lse2 = load_lse2(splits, splits < problem.config.num_splits)
    num_tiles = problem.walk(jnp.clip(triton.load(lens_ref.at[seq]), 0, problem.max_len)).num_tiles
    used = schedule.ceil_div(num_tiles, problem.split_tiles(num_tiles, lens_ref))

    @triton.when(used > 1)
    def _():
        first = load_partial(0)
        merged = softmax.merge_lse2(jnp.where((splits < used)[:, None], lse2, -jnp.inf), axis=0)

        def weighted(part, lse2):
            return jnp.sum(softmax.split_weight(lse2, merged)[:, :, None] * part, axis=0)

        def step(i, acc):
            return acc + weighted(*load_partial(i))

        out = lax.fori_loop(1, schedule.ceil_div(used, at_once), step, weighted(*first))
        tile = jnp.zeros(inside.shape, jnp.int32)
        place = out_ref.at[seq + tile, column[:, None] + tile, dim + tile]
        triton.store(place, out.astype(out_ref.dtype), mask=inside)
        place = lse_ref.at[seq + 0 * column, column]
        triton.store(place, softmax.natural_lse(merged), mask=real)
