"""Block-sparse decode in Pallas: sequences with one query.

One program serves one head of one sequence, over one piece of the blocks that its newest row lists. Heads differ in
what they see, so each reads its own blocks; what heads of a group have in common comes out of the L2. A sequence in
several pieces leaves float32 partial results, which are merged.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._call.configs import SplitKVConfig
from pallas_attn._tile import logits, masking, merge, pieces, result, rows, softmax, triton
from pallas_attn._tile.pieces import ceil_div
from pallas_attn._tile.problem import SplitKVProblem
from pallas_attn.ops.blocksparse_attention.layout import SparseLayout
from pallas_attn.ops.blocksparse_attention.problem import Blocks, Keys, Problem, divided, factor

# The tensor core's least, of which one is the query.
TILE_ROWS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pieces(SplitKVProblem):
    """How results are stored: every sequence in as many pieces, of which some may be empty."""

    rounding: ClassVar[float] = pieces.TO_NEAREST

    def num_tiles(self, seq_len: jax.Array) -> jax.Array:
        return 0 * seq_len + self.config.num_splits

    def of(self, seq) -> tuple[jax.Array, jax.Array]:
        count = self.config.num_splits
        return seq * count, 0 * seq + count


def decode(
    query: jax.Array,
    refs: dict[str, jax.Array],
    layout: SparseLayout,
    *,
    problem: Problem,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """(out [num_seqs, num_heads, head_dim], lse [num_seqs, num_heads]) of the sequences that have one query; others'
    mean nothing. Operands as of `prefill`."""
    config = problem.config
    stored = Pieces(
        num_seqs=problem.num_seqs,
        q_len=1,
        num_heads=problem.num_heads,
        max_pages=1,
        pool=problem.pool,
        scale=problem.scale,
        config=SplitKVConfig(TILE_ROWS, config.decode_block_kv, config.num_splits),
    )
    outputs = triton.kernel_call(
        functools.partial(_decode_kernel, problem=problem, stored=stored),
        query,
        refs,
        layout,
        name="pallas_attn_blocksparse_decode",
        grid=(problem.num_heads, problem.num_seqs, config.num_splits),
        out_shape=result.shapes(stored, problem.pool.head_dim, query.dtype),
        num_warps=config.decode_warps,
        num_stages=config.decode_stages,
        interpret=interpret,
    )
    out, lse = merge.merge(
        outputs,
        (),
        lambda: stored,
        name="pallas_attn_blocksparse_combine",
        problem=stored,
        most_pieces=config.num_splits,
        interpret=interpret,
    )
    return out[:, 0], lse[:, 0]


def _decode_kernel(query_ref, refs, layout: SparseLayout, *out_refs, problem: Problem, stored: Pieces):
    head, seq, split = (triton.program_id(axis) for axis in range(3))
    kv_head = head // problem.group
    k_start, k_len, token, bad = _sequence(problem, refs, seq)
    # The first row of the tile is the query, the others are none.
    lane = jnp.arange(TILE_ROWS)
    mine = rows.Rows(head % problem.group + lane, lane == 0, kv_head, 0 * lane, head + lane)
    dims = problem.dims
    q = rows.load(query_ref, mine, (token,), dims)

    row = divided(k_len - 1, layout.q_block_size)[0]
    blocks = Blocks.of_row(layout, head, row)
    keys = Keys(problem, refs, seq, k_start, kv_head)
    block_kv = problem.config.decode_block_kv
    tiles = layout.block_size // block_kv
    num_tiles = (blocks.end - blocks.begin) * tiles
    piece_tiles = ceil_div(num_tiles, problem.config.num_splits)
    begin = jnp.minimum(split * piece_tiles, num_tiles)
    end = jnp.minimum(begin + piece_tiles, num_tiles)

    def step(i, carry):
        state, bad, column = carry
        block, part = divided(i, tiles)
        next_block, next_part = divided(i + 1, tiles)
        following = blocks.column(blocks.begin + next_block)
        inside = (column >= 0) & (column * layout.block_size < (row + 1) * layout.q_block_size)
        ascends = (following > column) | (next_part > 0) | (next_block >= blocks.end - blocks.begin)
        if layout.row_parts > 1:
            ascends |= next_block == blocks.split - blocks.begin
        first = jnp.where(inside, column * layout.block_size + part * block_kv, 0)
        position = first + jnp.arange(block_kv)
        held = inside & (position < k_len)
        if layout.row_parts > 1:
            held &= (blocks.seen_by(blocks.begin + block) >> blocks.part(k_len - 1)) & 1 == 1
        tile_keys, values, usable = keys.read(first, held, block_kv, q.dtype)
        scaled = triton.dot(q, tile_keys, trans_b=True) * np.float32(factor(problem))
        logits2 = logits.shape(scaled, problem.rules, None, position, position)
        logits2 = masking.apply(logits2, held[None, :])
        if usable is not None:
            logits2 = softmax.poison(logits2, (held & ~usable)[None, :])
        state, weights = softmax.rescale(state, logits2)
        state = state._replace(acc=state.acc + triton.dot(weights.astype(values.dtype), values))
        return state, bad | ~(inside & ascends), following

    start = softmax.start((TILE_ROWS,), dims[1])
    start = start, bad | blocks.bad, blocks.column(blocks.begin + divided(begin, tiles)[0])
    state, bad, _ = lax.fori_loop(begin, end, step, start)
    out, lse2 = softmax.finish(state)
    done = result.Result(mine, (seq, 0 * lane), [dims], [out], lse2).poisoned(bad)
    result.store(done, out_refs, seq * problem.config.num_splits + split, split < 0)


def _sequence(problem: Problem, refs: dict[str, Any], seq: jax.Array):
    """(first row of keys, length, the query's token, whether the length cannot be right)."""
    token = seq
    one = True
    if problem.kinds == "mixed":
        token, token_end = (triton.load(refs["cu_q_lens"].at[seq + i]) for i in (np.int32(0), np.int32(1)))
        one = (token_end == token + 1) & (token >= 0) & (token < problem.num_tokens)
        token = jnp.where(one, token, 0)
    if problem.cache_layout is None:
        k_start, k_end = (triton.load(refs["cu_k_lens"].at[seq + i]) for i in (np.int32(0), np.int32(1)))
        bad = (k_start < 0) | (k_end < k_start) | (k_end > problem.pool.num_pages)
    else:
        k_start, k_end = 0 * seq, triton.load(refs["seq_lens"].at[seq])
        bad = (k_end < 0) | (k_end > problem.max_k_len)
    k_len = jnp.where(bad | (one is not True and ~one), 0, k_end - k_start)
    return k_start, k_len, token, bad
