"""Split-KV MLA decode attention in Pallas.

A token of the latent cache is 512 latent elements, which serve as key and as value, and 64 rotary ones, which serve
as key only. One program serves `block_q` query rows (the q_len x heads rows of one KV head, packed) and walks over
tokens in tiles of `block_kv`: the latent tile is loaded once and used for both products.

Which tokens a program walks over is decided in one of two ways (see `pieces.py`): by the caller's schedule, where a
program is a part that goes through several sequences, or, without one, by a grid of sequences and splits.
A sequence in one piece is written to the output at once; otherwise a program leaves a float32 partial result
(normalised, with its base-2 lse) for `combine.py`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._tile import masking, softmax, triton
from pallas_attn._tile.layout import pool_shape
from pallas_attn.ops.mla_decode import combine, pieces
from pallas_attn.ops.mla_decode.config import MLADecodeConfig
from pallas_attn.ops.mla_decode.problem import LATENT_DIM, Problem
from pallas_attn.ops.mla_decode.schedule import MLASchedule

# With this many the weights' sum over a tile, which takes shuffles and barriers, is left for the end. Elsewhere that
# measured slower, or was not tried.
LATE_SUM_ROWS = 32
# Latents are read once by each block of query rows: what else is in L2 is worth more.
LATENTS = "evict_first"
# Results are read again soon. While they stay in L2, their writes do not disturb the reads of latents: in device memory
# they cost several times their bytes.
RESULTS = "evict_last"


# jit, so that the layers of a model trace and lower one kernel, not one each.
@functools.partial(jax.jit, static_argnames=("scale", "causal", "config", "interpret"))
def mla_decode_pallas(
    query,
    latent_cache,
    block_tables,
    seq_lens,
    schedule: MLASchedule | None,
    *,
    scale: float,
    causal: bool,
    config: MLADecodeConfig,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """(out [num_seqs, q_len, num_heads, 512] in query's dtype, lse [num_seqs, num_heads, q_len] float32)."""
    num_seqs, q_len, num_heads, _ = query.shape
    problem = Problem(
        num_seqs=num_seqs,
        q_len=q_len,
        num_heads=num_heads,
        max_pages=block_tables.shape[1],
        pool=pool_shape(latent_cache, "NHD"),
        scale=scale,
        config=config,
        causal=causal and q_len > 1,
        num_parts=None if schedule is None else schedule.tile_scheduler_metadata.shape[0],
    )
    outputs = [
        jax.ShapeDtypeStruct((num_seqs, q_len, num_heads, LATENT_DIM), query.dtype),
        jax.ShapeDtypeStruct((num_seqs, num_heads, q_len), jnp.float32),
    ]
    if problem.num_pieces > num_seqs:
        partial_shape = (problem.num_pieces, problem.pool.num_kv_heads, problem.rows)
        outputs += [
            jax.ShapeDtypeStruct((*partial_shape, LATENT_DIM), jnp.float32),
            jax.ShapeDtypeStruct(partial_shape, jnp.float32),
        ]
    # Row blocks and KV heads vary fastest: programs that read the same or neighbouring bytes run together.
    heads = problem.pool.num_kv_heads * problem.q_blocks
    if schedule is None:
        body, grid = _grid_kernel, (heads, config.num_splits, num_seqs)
    else:
        body, grid = _scheduled_kernel, (heads, schedule.tile_scheduler_metadata.shape[0])
    out, lse, *partial = triton.kernel_call(
        functools.partial(body, problem=problem),
        *(query, latent_cache, block_tables, seq_lens, *(schedule or ())),
        name="pallas_attn_mla_decode",
        grid=grid,
        out_shape=outputs,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )
    if partial:
        partial_out, partial_lse2 = partial
        out, lse = combine.combine_pieces(
            out, lse, partial_out, partial_lse2, seq_lens, schedule, problem=problem, interpret=interpret
        )
    return out, lse


def _grid_kernel(query_ref, cache_ref, tables_ref, lens_ref, *out_refs, problem: Problem):
    head_block, split, seq = (triton.program_id(axis) for axis in range(3))
    cut = pieces.Grid(problem, lens_ref)
    seq_len, tokens = cut.length(seq), cut.tokens(seq)
    begin = split * tokens

    # Split 0 of an empty sequence has no tokens but still writes the output.
    @triton.when((begin < seq_len) | (split == 0))
    def _():
        end = jnp.minimum(begin + tokens, seq_len)
        first, count = cut.of(seq)
        refs = (query_ref, cache_ref, tables_ref, lens_ref, *out_refs)
        _serve(*refs, seq=seq, head_block=head_block, begin=begin, end=end, piece=first + split,
               one_piece=count <= 1, problem=problem)  # fmt: skip


def _scheduled_kernel(
    query_ref, cache_ref, tables_ref, lens_ref, metadata_ref, splits_ref, *out_refs, problem: Problem
):
    head_block, part = triton.program_id(0), triton.program_id(1)
    dealt = pieces.Scheduled(problem, splits_ref)
    begin_idx, begin_seqlen, end_idx, end_seqlen, begin_split = (
        triton.load(metadata_ref.at[part, jnp.int32(column)]) for column in range(5)
    )
    # A schedule made for other lengths must not make this kernel touch memory that is not its own.
    end_seqlen = jnp.maximum(end_seqlen, 0)  # nor make end - begin overflow
    first_seq = jnp.maximum(begin_idx, 0)
    last_seq = jnp.minimum(end_idx, problem.num_seqs - 1)

    def serve(seq, carry):
        seq_len = jnp.clip(triton.load(lens_ref.at[seq]), 0, problem.max_len)
        begin = jnp.where(seq == begin_idx, jnp.maximum(begin_seqlen, 0), 0)
        end = jnp.minimum(jnp.where(seq == end_idx, end_seqlen, seq_len), seq_len)
        first, count = dealt.of(seq)
        piece = jnp.clip(first + jnp.where(seq == begin_idx, begin_split, 0), 0, problem.num_pieces - 1)
        refs = (query_ref, cache_ref, tables_ref, lens_ref, *out_refs)
        _serve(*refs, seq=seq, head_block=head_block, begin=begin, end=end, piece=piece,
               one_piece=count <= 1, problem=problem)  # fmt: skip
        return carry

    lax.fori_loop(first_seq, last_seq + 1, serve, np.int32(0))


def _serve(
    query_ref, cache_ref, tables_ref, lens_ref, out_ref, lse_ref, *partial_refs,
    seq, head_block, begin, end, piece, one_piece, problem: Problem,
):  # fmt: skip
    """Attends one block of query rows to tokens [begin, end) of a sequence and writes the result."""
    config = problem.config
    kv_head = head_block // problem.q_blocks
    row = jnp.arange(config.block_q) + (head_block % problem.q_blocks) * config.block_q
    row_is_real = row < problem.rows
    token, head = row // problem.group, kv_head * problem.group + row % problem.group

    def place(ref, dims: jax.Array) -> tuple[Any, jax.Array]:
        """Elements `dims` of this block's rows in query or output, [block_q, dims], and a mask."""
        tile = jnp.zeros((config.block_q, dims.size), jnp.int32)
        index = (seq + tile, token[:, None] + tile, head[:, None] + tile, dims[None, :] + tile)
        return ref.at[index], row_is_real[:, None] & (tile == 0)

    *latents, rope = (first + jnp.arange(size) for first, size in problem.query_chunks)
    query = [
        triton.load(where, mask=real, other=0.0)
        for where, real in (place(query_ref, dims) for dims in (*latents, rope))
    ]

    stored_len = triton.load(lens_ref.at[seq])
    seq_len = jnp.clip(stored_len, 0, problem.max_len)
    # Query token i of q_len is the sequence's token seq_len - q_len + i, and sees itself and what is before it.
    row_end = jnp.minimum(end, seq_len - (problem.q_len - 1) + token) if problem.causal else None
    state, bad = _walk_tokens(query, cache_ref, tables_ref, seq, kv_head, begin, end, row_end, problem)
    out, lse2 = softmax.finish(state)

    # A length or page id that cannot be right makes its sequence NaN rather than quietly wrong.
    bad |= stored_len != seq_len
    *chunks, lse2 = (softmax.poison(result, bad) for result in (*out, lse2))

    def write_final():
        for chunk, dims in zip(chunks, latents, strict=True):
            where, real = place(out_ref, dims)
            triton.store(where, chunk.astype(out_ref.dtype), mask=real, eviction_policy=RESULTS)
        where = lse_ref.at[seq + 0 * row, head, token]
        triton.store(where, softmax.natural_lse(lse2), mask=row_is_real)

    if not partial_refs:
        write_final()
        return
    partial_out_ref, partial_lse_ref = partial_refs
    triton.when(one_piece)(write_final)

    @triton.when(~one_piece)
    def _():
        for chunk, dims in zip(chunks, latents, strict=True):
            tile = jnp.zeros(chunk.shape, jnp.int32)
            where = partial_out_ref.at[
                piece + tile, kv_head + tile, row[:, None] + tile, dims[None, :] + tile
            ]
            real = row_is_real[:, None] & (tile == 0)
            triton.store(where, chunk, mask=real, eviction_policy=RESULTS)
        where = partial_lse_ref.at[piece + 0 * row, kv_head + 0 * row, row]
        triton.store(where, lse2, mask=row_is_real)


def _walk_tokens(
    query, cache_ref, tables_ref, seq, kv_head, begin, end, row_end, problem: Problem
):  # fmt: skip
    """Online softmax of queries [block_q, 512 + 64], in chunks, over tokens [begin, end) of a sequence; also whether
    any token's page id was unusable. `row_end` [block_q] is where what a row may see ends, or None: at `end` for all
    of them."""
    pool, config = problem.pool, problem.config
    block_kv, page_size = config.block_kv, pool.page_size
    last_column = jnp.maximum(end - 1, 0) // page_size

    def page_of(column, last) -> jax.Array:
        return triton.load(tables_ref.at[seq + 0 * column, jnp.minimum(column, last)])

    def elements(first, page, held, dim, size) -> jax.Array:
        """Elements [block_kv, size] of a tile's tokens, 0 where none is held: a NaN would survive a weight of 0."""
        tile = jnp.zeros((block_kv, size), jnp.int32)
        mask = held[:, None] & (tile == 0)
        if problem.page_per_tile:
            tokens = triton.ds(first % page_size, block_kv)
            where = cache_ref.at[page, tokens, kv_head, triton.ds(dim, size)]
            return triton.load(where, mask=mask, other=0.0, eviction_policy=LATENTS)
        offset = (first + jnp.arange(block_kv)) % page_size
        dims = dim + jnp.arange(size)
        place = (page[:, None] + tile, offset[:, None] + tile, kv_head + tile, dims[None, :] + tile)
        return triton.load(cache_ref.at[place], mask=mask, other=0.0, eviction_policy=LATENTS)

    def logits2(keys) -> jax.Array:
        scale2 = problem.scale * softmax.LOG2_E
        products = [triton.dot(q, k, trans_b=True) for q, k in zip(query, keys, strict=True)]
        # Added before scaling, each would accumulate onto the one before: in one chain, and in its layout.
        return functools.reduce(jnp.add, [product * scale2 for product in products])

    def step(i, carry):
        state, bad, entry = carry
        first = begin + i * block_kv
        position = first + jnp.arange(block_kv)
        if problem.page_per_tile:
            # The next tile's page is looked up one step ahead, off the critical path.
            next_entry = page_of((first + block_kv) // page_size, last_column)
        else:
            entry = next_entry = page_of(position // page_size, last_column)
        usable = masking.usable_pages(entry, pool.num_pages)
        held = masking.within(position, end) & usable
        bad |= ~usable if problem.page_per_tile else jnp.min(usable.astype(jnp.int32)) == 0
        page = jnp.where(usable, entry, 0)
        keys = [elements(first, page, held, *dims) for dims in problem.query_chunks]

        def masked_logits2() -> jax.Array:
            visible = held[None, :]
            if row_end is not None:
                visible &= masking.within(position[None, :], row_end[:, None])
            return masking.apply(logits2(keys), visible)

        if not problem.asynchronous:
            logits = masked_logits2()
        else:
            # Only tiles at the end of a sequence need a mask. The branch also keeps Triton from seeing that these
            # logits feed the next product: it would give that product's layout, with all warps along the rows, to
            # both, and with 64 rows the second half of the warps would only repeat what the first half computes.
            logits = lax.cond(
                (first + block_kv <= unmasked_end) & ~bad, lambda: logits2(keys), masked_logits2
            )
        state, weights = softmax.rescale(state, logits)
        weights = weights.astype(cache_ref.dtype)
        values = keys[:-1]  # all but the rotary chunk
        acc = tuple(acc + triton.dot(weights, chunk) for acc, chunk in zip(state.acc, values, strict=True))
        return state._replace(acc=acc), bad, next_entry

    unmasked_end = end if row_end is None else jnp.minimum(end, jnp.min(row_end))
    num_tiles = (end - begin + block_kv - 1) // block_kv
    columns = begin // page_size + jnp.zeros(() if problem.page_per_tile else (block_kv,), jnp.int32)
    # The first entry does not wait for the length: without tokens it may be garbage, which nothing looks at.
    entry = page_of(columns, problem.max_pages - 1)
    late_sum = block_kv if config.block_q == LATE_SUM_ROWS else None
    dims = tuple(size for _, size in problem.latent_chunks)
    start = softmax.start((config.block_q,), dims, late_sum=late_sum)
    state, bad, _ = lax.fori_loop(0, num_tiles, step, (start, jnp.bool_(False), entry))
    return state, bad
