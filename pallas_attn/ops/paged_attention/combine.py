"""Merging the splits of a sequence: out = sum_s w_s out_s with w_s = exp(lse_s - lse).

A kernel of its own rather than XLA reductions: it reads only the splits a sequence really has, in a fixed order
(same bits every run), and leaves sequences in one split, which are already final, untouched in the aliased output.
"""

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn import _pallas, _softmax
from pallas_attn.ops.paged_attention import schedule

if TYPE_CHECKING:
    from pallas_attn.ops.paged_attention.kernel import Problem

SPLITS_PER_STEP = 16


def combine_splits(
    out, lse, partial, seq_lens, *, problem: "Problem", interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Fills the rows of `out` and `lse` whose sequences were split, in place, from `partial` (out, lse2)."""
    return _pallas.kernel_call(
        functools.partial(_combine_kernel, problem=problem),
        out,
        lse,
        *partial,
        seq_lens,
        name="pallas_attn_paged_attention_combine",
        grid=(problem.q_len * problem.num_heads, problem.num_seqs),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (out, lse)],
        input_output_aliases={0: 0, 1: 1},
        num_warps=4,
        num_stages=1,
        interpret=interpret,
    )


def _combine_kernel(
    _out_in, _lse_in, partial_out_ref, partial_lse_ref, lens_ref, out_ref, lse_ref, *, problem: "Problem"
):
    column, seq = _pallas.program_id(0), _pallas.program_id(1)
    num_tiles = problem.walk(jnp.clip(_pallas.load(lens_ref.at[seq]), 0, problem.max_len)).num_tiles
    used = schedule.ceil_div(num_tiles, problem.split_tiles(num_tiles, lens_ref))

    @_pallas.when(used > 1)
    def _():
        splits = jnp.arange(_pallas.next_power_of_2(problem.config.num_splits))
        place = partial_lse_ref.at[splits, seq + 0 * splits, column + 0 * splits]
        lse2 = _pallas.load(place, mask=splits < used, other=-jnp.inf)
        merged = _softmax.merge_lse2(lse2, axis=0)
        lse_ref[seq, column] = _softmax.natural_lse(merged)

        dim = jnp.arange(_pallas.tile_side(problem.pool.head_dim))[None, :]
        rows = min(SPLITS_PER_STEP, len(splits))

        def step(i, acc):
            split = i * rows + jnp.arange(rows)
            present = split < used
            place = partial_lse_ref.at[split, seq + 0 * split, column + 0 * split]
            weight = _softmax.split_weight(_pallas.load(place, mask=present, other=-jnp.inf), merged)
            inside = present[:, None] & (dim < problem.pool.head_dim)
            tile = jnp.zeros(inside.shape, jnp.int32)
            place = partial_out_ref.at[split[:, None] + tile, seq + tile, column + tile, dim + tile]
            part = _pallas.load(place, mask=inside, other=0.0)
            return acc + jnp.sum(weight[:, None] * part, axis=0)

        steps = (used + rows - 1) // rows
        out = lax.fori_loop(0, steps, step, jnp.zeros((dim.shape[1],), jnp.float32))
        dim = dim.reshape(-1)
        place = out_ref.at[seq + 0 * dim, column + 0 * dim, dim]
        _pallas.store(place, out.astype(out_ref.dtype), mask=dim < problem.pool.head_dim)
