"""Merging the pieces of a sequence: out = sum_s w_s out_s with w_s = exp(lse_s - lse).

This is the online softmax once more, with pieces for keys: their lse are the logits, their outputs the values. Only
the pieces a sequence really has are read, in a fixed order (same bits every run), and a sequence in one piece,
which is already final, is left untouched in the aliased output.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn._tile import softmax, triton
from pallas_attn.ops.mla_decode import pieces
from pallas_attn.ops.mla_decode.problem import Problem
from pallas_attn.ops.mla_decode.schedule import MLASchedule

NUM_WARPS = 4
# Elements of partial output in flight per program: 64 registers a thread.
TILE_ELEMENTS = 64 * 32 * NUM_WARPS
# With fewer programs than this, more of them are cheaper than more work in each.
FEW_PROGRAMS = 512


def combine_pieces(
    out,
    lse,
    partial_out,
    partial_lse2,
    seq_lens,
    schedule: MLASchedule | None,
    *,
    problem: Problem,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Fills the rows of `out` and `lse` whose sequences were cut, in place."""
    latent_dim = partial_out.shape[-1]
    total_rows = problem.pool.num_kv_heads * problem.rows
    # A long sequence has many pieces and wants them loaded together; a big batch has few a sequence, and one
    # program for several rows.
    block_d = 128
    block_rows = 1
    while problem.num_seqs * math.ceil(total_rows / block_rows) * (latent_dim // block_d) > FEW_PROGRAMS:
        if block_rows >= 16:
            break
        block_rows, block_d = 2 * block_rows, min(2 * block_d, latent_dim)
    most = problem.config.num_splits if problem.num_parts is None else problem.num_parts
    block_pieces = min(
        max(1, TILE_ELEMENTS // (block_rows * block_d)),
        triton.next_power_of_2(min(most, problem.num_pieces)),
    )
    return triton.kernel_call(
        functools.partial(
            _combine_kernel,
            problem=problem,
            block_rows=block_rows,
            block_pieces=block_pieces,
            block_d=block_d,
        ),
        out,
        lse,
        partial_out,
        partial_lse2,
        seq_lens if schedule is None else schedule.num_splits,
        name="pallas_attn_mla_decode_combine",
        grid=(math.ceil(total_rows / block_rows), latent_dim // block_d, problem.num_seqs),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (out, lse)],
        input_output_aliases={0: 0, 1: 1},
        num_warps=NUM_WARPS,
        num_stages=1,
        interpret=interpret,
    )


def _combine_kernel(
    _out_in, _lse_in, partial_out_ref, partial_lse_ref, cut_ref, out_ref, lse_ref, *,
    problem: Problem, block_rows: int, block_pieces: int, block_d: int,
):  # fmt: skip
    row_block, dim_block, seq = (triton.program_id(axis) for axis in range(3))
    cut: pieces.Pieces = (
        pieces.Grid(problem, cut_ref) if problem.num_parts is None else pieces.Scheduled(problem, cut_ref)
    )
    first, count = cut.of(seq)

    @triton.when(count > 1)
    def _():
        flat_row = row_block * block_rows + jnp.arange(block_rows)
        row_is_real = flat_row < problem.pool.num_kv_heads * problem.rows
        kv_head, row = flat_row // problem.rows, flat_row % problem.rows
        dim = dim_block * block_d + jnp.arange(block_d)

        def step(i, state):
            index = i * block_pieces + jnp.arange(block_pieces)
            present = row_is_real[:, None] & (index < count)[None, :]
            index = first + index
            tile = jnp.zeros(present.shape, jnp.int32)
            place = partial_lse_ref.at[index[None, :] + tile, kv_head[:, None] + tile, row[:, None] + tile]
            lse2 = triton.load(place, mask=present, other=-jnp.inf)
            tile = jnp.zeros((block_rows, block_pieces, block_d), jnp.int32)
            place = partial_out_ref.at[
                index[None, :, None] + tile,
                kv_head[:, None, None] + tile,
                row[:, None, None] + tile,
                dim[None, None, :] + tile,
            ]
            # Requested before the weights are worked out, which takes as long as the load.
            part = triton.load(place, mask=present[:, :, None] & (tile == 0), other=0.0)
            state, weights = softmax.rescale(state, lse2)
            return state._replace(acc=state.acc + jnp.sum(weights[:, :, None] * part, axis=1))

        start = softmax.start((block_rows,), block_d)
        steps = (count + block_pieces - 1) // block_pieces
        out, lse2 = softmax.finish(lax.fori_loop(0, steps, step, start))
        token, head = row // problem.group, kv_head * problem.group + row % problem.group
        tile = jnp.zeros(out.shape, jnp.int32)
        place = out_ref.at[seq + tile, token[:, None] + tile, head[:, None] + tile, dim[None, :] + tile]
        triton.store(place, out.astype(out_ref.dtype), mask=row_is_real[:, None] & (tile == 0))

        @triton.when(dim_block == 0)
        def _():
            place = lse_ref.at[seq + 0 * row, head, token]
            triton.store(place, softmax.natural_lse(lse2), mask=row_is_real)
