"""Split-KV MLA decode attention in Pallas.

A token of the latent cache is 512 latent elements, which serve as key and as value, and 64 rotary ones, which serve
as key only. One program serves `block_q` query rows (the q_len x heads rows of one KV head, packed) and walks over
tokens in tiles of `block_kv`: the latent tile is loaded once and used for both products.

Which tokens a program walks over follows (see `_split/splits.py`) from the caller's schedule, where a program is a part
that serves several sequences, or, without one, from a grid of sequences and splits. A sequence in one split is written
to the output at once; otherwise a program leaves a float32 partial result for the merge.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._split import merge, result
from pallas_attn._split.splits import FairSplits, ScheduledSplits, Split, each, fair
from pallas_attn._tile import latent_tile, logits, masking, pages, rows, softmax, triton
from pallas_attn._tile.latents import LATENT_DIM
from pallas_attn._tile.walk import Seen
from pallas_attn.mods.operands import NOTHING, Tile, has_mask, has_score, over_rows
from pallas_attn.mods.program import KEY
from pallas_attn.mods.seen import Left, of_sequences
from pallas_attn.ops.mla_decode import transposed
from pallas_attn.ops.mla_decode.config import MLADecodeConfig
from pallas_attn.ops.mla_decode.operands import Operands
from pallas_attn.ops.mla_decode.problem import Problem
from pallas_attn.ops.mla_decode.transposed import LATENTS

# With this many rows, weights are summed over a tile, which takes shuffles and barriers, only at the end. For other
# numbers that measured slower or was not tried.
LATE_SUM_ROWS = 32
# Results are read again soon. Kept in the L2, their writes do not disturb the reads of latents; in device memory they
# would cost several times their bytes.
RESULTS = "evict_last"


# jit, so that a model's layers share one traced and lowered kernel.
@functools.partial(jax.jit, static_argnames=("config", "lowering"))
def mla_decode_pallas(
    operands: Operands, *, config: MLADecodeConfig, lowering: triton.Lowering = "pallas"
) -> tuple[jax.Array, jax.Array]:
    """(out [num_seqs, q_len, num_heads, 512] in query's dtype, lse [num_seqs, q_len, num_heads] float32)."""
    sizes, schedule = operands.sizes, operands.schedule
    num_parts = None if schedule is None else schedule.tile_scheduler_metadata.shape[0]
    problem = Problem(
        **vars(sizes),
        scale=operands.scale,
        config=config,
        causal=operands.causal and sizes.q_len > 1,
        num_parts=num_parts,
        modded=operands.mods is not None,
        by_tiles=has_mask(operands.mods),
    )
    if operands.mods is not None and problem.by_tiles:
        found = of_sequences(operands.mods, operands.seq_lens, problem.q_len, problem.max_len)
        operands = dataclasses.replace(operands, left=Left.of(found, config.block_kv))
    if problem.transposed:
        pages_in_rows = operands.latent_cache.reshape(sizes.pool.num_pages, -1)
        operands = dataclasses.replace(operands, latent_cache=pages_in_rows)
    body = _sliced_kernel if num_parts is None else _scheduled_kernel
    outputs = triton.kernel_call(
        functools.partial(body, problem=problem),
        operands,
        name="pallas_attn_mla_decode",
        # Row blocks and KV heads vary fastest, so that programs that read the same or neighbouring bytes run together.
        grid=(problem.programs_per_split, num_parts or problem.num_programs),
        out_shape=result.shapes(problem, LATENT_DIM, operands.query.dtype),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        lowering=lowering,
    )
    if schedule is None or num_parts is None:
        cut = operands.seq_lens if operands.left is None else operands.left.tiles
        splits_of = functools.partial(FairSplits.of_all, problem)
    else:
        cut, splits_of = schedule.num_splits, functools.partial(ScheduledSplits, num_parts)
    return merge.merge(
        outputs,
        (cut,),
        splits_of,
        name="pallas_attn_mla_decode_combine",
        problem=problem,
        num_cut=sizes.num_seqs if num_parts else problem.most_cut,
        most_splits=num_parts or problem.most_splits,
        lowering=lowering,
    )


def _sliced_kernel(refs: Operands, *out_refs, problem: Problem):
    head_block, program = triton.program_id(0), triton.program_id(1)

    def serve(split: Split) -> None:
        left = None
        if refs.left is None:
            keys_end = jnp.clip(triton.load(refs.seq_lens.at[split.seq]), 0, problem.max_len)
            begin, end = (tile * problem.config.block_kv for tile in split.tiles(problem.num_tiles(keys_end)))
            end = jnp.minimum(end, keys_end)
        else:
            left, tiles = refs.left.load(split.seq), triton.load(refs.left.tiles.at[split.seq])
            begin, end = (tile * problem.config.block_kv for tile in split.tiles(tiles))
        _serve(refs, *out_refs, seq=split.seq, head_block=head_block, begin=begin, end=end,
               place=split.place, one_split=split.count == 1, problem=problem, left=left)  # fmt: skip

    each(fair(problem, refs.seq_lens if refs.left is None else refs.left.tiles), problem, program, serve)


def _scheduled_kernel(refs: Operands, *out_refs, problem: Problem):
    head_block, part = triton.program_id(0), triton.program_id(1)
    assert problem.num_parts is not None
    assert refs.schedule is not None
    tile_scheduler_metadata, num_splits = refs.schedule
    dealt = ScheduledSplits(problem.num_parts, num_splits)
    begin_idx, begin_seqlen, end_idx, end_seqlen, begin_split = (
        triton.load(tile_scheduler_metadata.at[part, jnp.int32(column)]) for column in range(5)
    )
    # A schedule made for other lengths must not make this kernel touch memory that is not its own.
    end_seqlen = jnp.maximum(end_seqlen, 0)  # nor make end - begin overflow
    first_seq = jnp.maximum(begin_idx, 0)
    last_seq = jnp.minimum(end_idx, problem.num_seqs - 1)

    def serve(seq, carry):
        seq_len = jnp.clip(triton.load(refs.seq_lens.at[seq]), 0, problem.max_len)
        begin = jnp.where(seq == begin_idx, jnp.maximum(begin_seqlen, 0), 0)
        end = jnp.minimum(jnp.where(seq == end_idx, end_seqlen, seq_len), seq_len)
        first, count = dealt.of(seq)
        place = dealt.place(first + jnp.where(seq == begin_idx, begin_split, 0))
        _serve(refs, *out_refs, seq=seq, head_block=head_block, begin=begin, end=end, place=place,
               one_split=count <= 1, problem=problem)  # fmt: skip
        return carry

    lax.fori_loop(first_seq, last_seq + 1, serve, np.int32(0))


def _serve(
    refs: Operands, *out_refs, seq, head_block, begin, end, place, one_split, problem: Problem, left: Seen | None = None
):  # fmt: skip
    """Attends from one block of query rows to tokens [begin, end) of a sequence and writes the result. Of what a mask
    has `left` they count whole tiles, without those that are not walked."""
    mine = problem.rows_of(head_block)
    leading = rows.batched(mine, seq)
    # The latents before the rotary part: they are needed first.
    query = [rows.load(refs.query, mine, leading, chunk) for chunk in problem.query_chunks]

    stored_len = triton.load(refs.seq_lens.at[seq])
    seq_len = jnp.clip(stored_len, 0, problem.max_len)
    # Query token i of q_len is the sequence's token seq_len - q_len + i, and sees up to itself.
    keys_end = end if left is None else left.end
    row_end = jnp.minimum(keys_end, seq_len - (problem.q_len - 1) + mine.token) if problem.causal else None
    where = query, refs, seq, mine.kv_head, begin, end, row_end, problem
    if problem.transposed:
        state, bad = transposed.walk_tokens(*where)
    else:
        mods = NOTHING
        if refs.mods is not None:
            query_at = seq_len - problem.q_len + mine.token
            mods = over_rows(refs.mods, refs.captured, seq, mine, query_at, problem.max_len)
        state, bad = _walk_tokens(*where, mods, left)
    out, lse = softmax.finish(softmax.natural(state, 1.0 if has_score(refs.mods) else softmax.LN_2))
    done = result.Result(mine, leading, problem.latent_chunks, out, lse).poisoned(
        bad | (stored_len != seq_len)
    )
    result.store(done, out_refs, place, one_split, eviction_policy=RESULTS)


def _walk_tokens(
    query, refs: Operands, seq, kv_head, begin, end, row_end, problem: Problem, mods: Tile, left: Seen | None
):  # fmt: skip
    """Online softmax of queries [block_q, 512 + 64], in chunks, over tokens [begin, end) of a sequence; also whether
    any token's page id was invalid. `row_end` [block_q] is the end of what each row sees; None: `end` for all."""
    pool, config = problem.pool, problem.config
    block_kv, page_size = config.block_kv, pool.page_size
    keys_end = end if left is None else left.end
    last_column = jnp.maximum(keys_end - 1, 0) // page_size

    def first_of(i) -> jax.Array:
        """First token of the i-th tile."""
        if left is None:
            return begin + i * block_kv
        number = left.first_tile(block_kv) + begin // block_kv + i
        return left.gap_of(block_kv).back(number) * block_kv

    def page_of(column, last) -> jax.Array:
        return pages.look_up(refs.block_tables, seq, jnp.minimum(column, last))

    def elements(first, page, held, chunk) -> jax.Array:
        if problem.page_per_tile:
            where = (page, first % page_size, kv_head, chunk, held)
            return pages.run(refs.latent_cache, *where, eviction_policy=LATENTS)
        where = (page, (first + jnp.arange(block_kv)) % page_size, kv_head, chunk, held)
        return pages.gather(
            refs.latent_cache, "NHD", "key", *where, head_dim=pool.head_dim, eviction_policy=LATENTS
        )

    def tile_logits(keys, position) -> jax.Array:
        """Natural ones where there is a score_mod, else base 2."""
        here = mods.at(KEY, position, problem.max_len)
        if here.score is None:
            return here.masked(logits.products(query, keys, problem.scale * softmax.LOG2_E))
        found = here.score_of(logits.products(query, keys, problem.scale))
        return here.masked(triton.rounded(found))

    factor = softmax.LOG2_E if mods.score is not None else 1.0

    def step(i, carry):
        state, bad, entry = carry
        first = first_of(i)
        position = first + jnp.arange(block_kv)
        if problem.page_per_tile:
            # The next tile's page is looked up one step ahead, off the critical path.
            following = first + block_kv if left is None else first_of(i + 1)
            next_entry = page_of(following // page_size, last_column)
        else:
            entry = next_entry = page_of(position // page_size, last_column)
        usable = masking.usable_pages(entry, pool.num_pages)
        mine = masking.within(position, keys_end) if left is None else left.among(position)
        held = mine & usable
        # Of a tile some tokens may lie in pages that are anyone's.
        known = usable if left is None or problem.page_per_tile else usable | ~mine
        bad |= ~known if problem.page_per_tile else jnp.min(known.astype(jnp.int32)) == 0
        page = jnp.where(usable, entry, 0)
        read = functools.partial(elements, first, page, held)
        keys = latent_tile.read(read, refs.latent_cache.dtype, problem.latent_chunks)

        def masked_logits() -> jax.Array:
            visible = held[None, :]
            if row_end is not None:
                visible &= masking.within(position[None, :], row_end[:, None])
            return masking.apply(tile_logits(keys, position), visible)

        if not problem.asynchronous:
            tile = masked_logits()
        else:
            # Only tiles at the end of a sequence need a mask. The branch also keeps Triton from seeing that these
            # logits feed the next product: it would give that product's layout, with all warps along the rows, to
            # both, and with 64 rows the second half of the warps would only repeat what the first half computes.
            clear = (first + block_kv <= unmasked_end) & ~bad
            if left is not None:
                clear &= (first >= left.first) & ((first + block_kv <= left.gap) | (first >= left.rest))
            tile = lax.cond(clear, lambda: tile_logits(keys, position), masked_logits)
        state, weights = softmax.rescale(state, tile, factor)
        weights = weights.astype(keys[0].dtype)
        values = keys[:-1]  # all but the rotary chunk
        acc = tuple(acc + triton.dot(weights, chunk) for acc, chunk in zip(state.acc, values, strict=True))
        return state._replace(acc=acc), bad, next_entry

    unmasked_end = keys_end if row_end is None else jnp.minimum(keys_end, jnp.min(row_end))
    num_tiles = (end - begin + block_kv - 1) // block_kv
    columns = (begin if left is None else first_of(0)) // page_size + jnp.zeros(
        () if problem.page_per_tile else (block_kv,), jnp.int32
    )
    # The first entry is loaded without waiting for the length: without tokens it may be garbage, but is not used.
    entry = page_of(columns, problem.max_pages - 1)
    late_sum = block_kv if config.block_q == LATE_SUM_ROWS else None
    dims = tuple(size for _, size in problem.latent_chunks)
    start = softmax.start((config.block_q,), dims, late_sum=late_sum)
    state, bad, _ = lax.fori_loop(0, num_tiles, step, (start, jnp.bool_(False), entry))
    return state, bad
