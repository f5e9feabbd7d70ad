"""Split-KV paged decode attention in Pallas.

One program serves `block_q` query rows of one KV head over one split of one sequence. It walks the split's tiles of
`block_kv` tokens, looking each token's page up in the block table, and keeps an online softmax in float32.
A sequence in one split is written to the output at once; otherwise the program leaves a float32 partial result for
the merge.

A program of eight rows transposes its products. The tensor core wants 16 of a product's first side, which are then the
tile's tokens and the columns of its values; of the second, the rows, it takes 8.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._call import sizes
from pallas_attn._call.pools import Which
from pallas_attn._split import merge, result
from pallas_attn._split.splits import FairSplits, Split, each, fair
from pallas_attn._tile import logits, masking, narrow, pages, quantization, rows, softmax, tree, triton, walk
from pallas_attn._types import Array
from pallas_attn.mods.operands import NOTHING, Tile, has_mask, has_score, over_rows
from pallas_attn.mods.program import KEY
from pallas_attn.mods.seen import Left, of_sequences
from pallas_attn.ops.paged_attention.config import PagedAttentionConfig
from pallas_attn.ops.paged_attention.operands import Operands
from pallas_attn.ops.paged_attention.problem import Problem


# jit, so that a model's layers share one traced and lowered kernel.
@functools.partial(jax.jit, static_argnames=("config", "lowering"))
def paged_attention_pallas(
    operands: Operands, *, config: PagedAttentionConfig, lowering: triton.Lowering = "pallas"
) -> tuple[jax.Array, jax.Array]:
    """(out in query's dtype, lse float32)"""
    problem = Problem(
        **vars(operands.sizes),
        scale=operands.scale,
        config=config,
        layout=operands.layout,
        rules=operands.rules,
        by_tiles=has_mask(operands.mods) and operands.rules.block_sparse is None,
    )
    operands = dataclasses.replace(operands, left=_left(operands, problem))
    outputs = triton.kernel_call(
        functools.partial(_attend_kernel, problem=problem),
        operands,
        name="pallas_attn_paged_attention",
        # Programs of neighbouring KV heads start together, since they read neighbouring bytes in the NHD layout.
        grid=(problem.programs_per_split, problem.num_programs),
        out_shape=result.shapes(problem, problem.pool.head_dim, operands.query.dtype),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        most_together=problem.most_together,
        merged=problem.num_places > 0,
        lowering=lowering,
    )
    return merge.merge(
        outputs,
        (_dealt_by(operands), operands.sliding_window),
        lambda seq_lens, sliding_window: FairSplits.of_all(problem.with_window(sliding_window), seq_lens),
        name="pallas_attn_paged_attention_combine",
        problem=problem,
        num_cut=problem.most_cut,
        most_splits=problem.most_splits,
        lowering=lowering,
        counted=True,
    )


def _left(operands: Operands, problem: Problem) -> Left | None:
    """What the mask_mod leaves of sequences; None without one, and where a pattern says which blocks are walked."""
    if operands.mods is None or not problem.by_tiles:
        return None
    traced = None if operands.sliding_window is None else operands.sliding_window[0]
    window = problem.rules.with_window(traced).sliding_window
    found = of_sequences(operands.mods, operands.seq_lens, problem.q_len, problem.max_len, window)
    return Left.of(found, problem.config.block_kv)


def _dealt_by(operands: Operands) -> Array:
    """The lengths that splits go by, of arrays or refs."""
    return operands.seq_lens if operands.left is None else operands.left.tiles


def _attend_kernel(refs: Operands, *out_refs, problem: Problem):
    head_block, program = (triton.program_id(axis) for axis in range(2))
    per_split = problem.programs_per_split
    pages.touch(refs.block_tables, program * per_split + head_block, per_split * problem.num_programs)
    problem = problem.with_window(refs.sliding_window)
    dtype = quantization.compute_dtype(refs.query.dtype, refs.key_cache.dtype, refs.k_scale, refs.v_scale)
    ask = functools.partial(_query, refs.query, head_block, problem, dtype)
    # A single sequence's queries are loaded before its length is known.
    only = ask(0 * program) if problem.num_seqs == 1 else None

    def query_of(seq: jax.Array) -> _Query:
        return ask(seq) if only is None else only

    serve = functools.partial(_serve, refs, *out_refs, query_of=query_of, problem=problem)
    each(fair(problem, _dealt_by(refs)), problem, program, lambda split: serve(split=split))


class _Query(NamedTuple):
    """A block of a sequence's query rows."""

    mine: rows.Rows
    leading: tuple[jax.Array, ...]
    elements: jax.Array


def _query(query: Array, head_block, problem: Problem, dtype, seq) -> _Query:
    mine = problem.rows_of(head_block)
    leading = rows.batched(mine, seq)
    q = rows.load(query, mine, leading, sizes.whole(problem.pool.head_dim))
    return _Query(mine, leading, quantization.query_as(q, dtype))


def _serve(
    refs: Operands, *out_refs, query_of: Callable[[jax.Array], _Query], split: Split, problem: Problem
):
    """Attends from one block of query rows to a split of a sequence and writes the result."""
    seq, dims = split.seq, sizes.whole(problem.pool.head_dim)
    stored_len = triton.load(refs.seq_lens.at[seq])
    # Loaded together with the length, which is not needed to find the query, rather than after it.
    mine, leading, q = query_of(seq)
    seq_len = jnp.clip(stored_len, 0, problem.max_len)
    query_at = seq_len - problem.q_len + mine.token
    left, keys_end = None, seq_len
    if refs.left is not None:
        left = refs.left.load(seq)
        keys_end = left.end
    tiles = problem.walk(seq_len, mine.kv_head, left)
    begin, end = split.tiles(tiles.num_tiles)
    # With few rows there are registers for late sums, and tokens are spread over warps, so a sum would be a barrier.
    few = problem.config.block_q <= sizes.tile_side(1)
    state = softmax.start(mine.index.shape, dims[1], late_sum=problem.config.block_kv if few else None)
    look_up = functools.partial(pages.look_up, refs.block_tables, seq)
    ids = functools.partial(_page_ids, look_up, keys_end, problem)
    read = functools.partial(_read_tile, refs, ids, mine.kv_head, problem, q.dtype)
    drafts = tree.Drafts(seq_len, seq_len - problem.q_len, problem.q_len)
    draft_tree = functools.partial(tree.of_tile, refs, drafts, lambda token: (seq + 0 * token, token), mine)
    mods, rows_first = NOTHING, not problem.transposed
    if refs.mods is not None:
        mods = over_rows(
            refs.mods, refs.captured, seq, mine, query_at, problem.max_len, rows_first=rows_first
        )
    weigh = functools.partial(_logits, q, mine, query_at, draft_tree, mods, refs, problem)
    # Tiles of bytes keep the tensor cores waiting for instructions.
    lean = few and narrow.deals(refs.value_cache.dtype, q.dtype, problem.layout)
    exp2_below = functools.partial(triton.exp2_below, exp2=triton.exp2 if lean else jnp.exp2)
    if problem.transposed:
        ahead = functools.partial(_look_up_tile, look_up, tiles, end, keys_end, problem)
        state, lost = _walk_transposed(state, tiles, begin, end, keys_end, read, ahead, weigh, exp2_below)
    else:
        state, lost = _walk_tiles(state, tiles, begin, end, keys_end, read, weigh, exp2_below), None
    scale = _scale(problem, refs.k_scale, mine.kv_head)
    state = softmax.natural(
        state, logits.natural_scale(problem.rules, scale, refs.alibi_slopes, has_score=has_score(refs.mods))
    )
    if refs.sinks is not None:
        # The sink joins the softmax once: in the first split of a sequence.
        sink = triton.load(refs.sinks.at[mine.head], mask=mine.real, other=0.0)
        state = softmax.join(state, jnp.where((split.index == 0) & (seq_len > 0), sink, np.float32(-np.inf)))
    out, lse = softmax.finish(state)
    if narrow.deals(refs.value_cache.dtype, q.dtype, problem.layout):
        out = narrow.in_order(out)
    if refs.v_scale is not None and not quantization.is_by_page(refs.v_scale):
        out *= triton.load(refs.v_scale.at[mine.kv_head])
    # An invalid length; for page ids see _walk_tiles.
    bad = stored_len != seq_len if lost is None else (stored_len != seq_len) | lost
    done = result.Result(mine, leading, [dims], [out], lse).poisoned(bad)
    result.store(done, out_refs, split.place, split.count == 1)


def _walk_tiles(state, tiles: walk.Walk, begin, end, seq_len, read, weigh, exp2_below):
    """The state after tiles [begin, end)."""

    def step(i, state):
        position, held = tiles.tokens(i, seq_len)
        keys, key_scale, values, usable = read(tiles.start(i), held)
        given = weigh(keys, key_scale, position)
        tile = masking.apply(given.logits, held[None, :])
        # An invalid page id makes its sequence NaN rather than silently wrong. Marking the logits keeps the ids in the
        # pipeline; a flag beside the state would load them again, and wait.
        tile = softmax.poison(tile, (held & ~usable)[None, :])
        state, weights = softmax.rescale(state, tile, given.factor, exp2_below=exp2_below)
        return state._replace(acc=state.acc + triton.dot(weights.astype(values.dtype), values))

    return lax.fori_loop(begin, end, step, state)


def _walk_transposed(state, tiles: walk.Walk, begin, end, seq_len, read, ahead, weigh, exp2_below):
    """(the state after tiles [begin, end), taken with rows last; whether a page id is invalid).

    Page ids, `ahead(tile)`, come from the previous step: loaded in the same step, Triton would copy them with keys and
    values, and waiting for them would wait for all copies in flight.
    """

    def step(i, carry):
        state, page, lost = carry
        position, held = tiles.tokens(i, seq_len)
        keys, key_scale, values, usable = read(tiles.start(i), held, page)
        given = weigh(keys, key_scale, position)
        tile = masking.apply(given.logits, held[:, None])
        state, weights = softmax.rescale(state, tile, given.factor, axis=0, exp2_below=exp2_below)
        state = state._replace(acc=state.acc + triton.dot(values.T, weights.astype(values.dtype)))
        # Ids have another layout than the logits, and marking these would take them through shared memory.
        return state, ahead(i + 1), lost | jnp.where(held & ~usable, 1, 0)

    lost = jnp.zeros(tiles.block_kv, jnp.int32)
    state, _, lost = lax.fori_loop(begin, end, step, (softmax.transposed(state), ahead(begin), lost))
    return softmax.transposed(state), jnp.max(lost) > 0


def _look_up_tile(look_up, tiles: walk.Walk, end, seq_len, problem: Problem, i):
    """The page ids of the tokens of tile `i`, if it is before `end`."""
    _, held = tiles.tokens(i, seq_len)
    column, _ = pages.slots(tiles.start(i), held.shape[0], problem.pool.page_size)
    return look_up(column, mask=held & (i < end), other=0)


def _page_ids(look_up, seq_len, problem: Problem, start, held) -> jax.Array:
    """The page ids of a tile's tokens from `start` on; arbitrary where not `held`."""
    size, page_size = held.shape[0], problem.pool.page_size
    column, _ = pages.slots(start, size, page_size)
    # With fewer tokens than threads Triton copies ids to shared memory (3.6: once for each layout that uses them), so
    # one id a page is loaded. With more tokens ids stay in registers; copying them would take a stage of the pipeline.
    most, least = max(size, page_size), min(size, page_size)
    if size >= 32 * problem.config.num_warps or most % least:
        return look_up(column, mask=held, other=0)
    column = start // page_size + jnp.arange(size // least)
    page = look_up(column, mask=column * page_size < seq_len, other=0)
    return jnp.broadcast_to(page[:, None], (page.shape[0], least)).reshape(-1)


def _read_tile(refs: Operands, ids, kv_head, problem: Problem, dtype, start, held, page=None):
    """(keys [block_kv, dims], their pages' scale or None, values, which tokens' pages exist), in `dtype`, 0 where not
    held. Of the scales only a page's v_scale is applied. Columns of values are dealt if `narrow.deals`.

    `start` is the tile's first token; `held` which of its slots are filled; `page` their page ids, if already loaded.
    """
    pool = problem.pool
    _, offset = pages.slots(start, held.shape[0], pool.page_size)
    if page is None:
        page = ids(start, held)
    usable = masking.usable_pages(page, pool.num_pages)
    # Ids pass through shared memory, and a mask would have to as well. What is read for an invalid one does not matter:
    # the result is NaN.
    page = jnp.where(usable, page, 0)

    def read(which: Which, ref: Array):
        place = (page, offset, kv_head, sizes.whole(pool.head_dim))
        return pages.gather(ref, problem.layout, which, *place, held, head_dim=pool.head_dim)

    keys, values = read("key", refs.key_cache), read("value", refs.value_cache)
    key_scale, value_scale = (
        pages.scale(scale, page, kv_head, held) if quantization.is_by_page(scale) else None
        for scale in (refs.k_scale, refs.v_scale)
    )
    if value_scale is not None:
        values = values.astype(jnp.float32) * value_scale[:, None]
    deals = narrow.deals(refs.value_cache.dtype, dtype, problem.layout)
    values = narrow.operand(values, dtype) if deals else values.astype(dtype)
    return keys.astype(dtype), key_scale, values, usable


def _logits(
    q, mine: rows.Rows, query_at, draft_tree, mods: Tile, refs: Operands, problem: Problem,
    keys, key_scale, position,
) -> logits.Shaped:  # fmt: skip
    """Logits [block_q, block_kv] with every rule applied; transposed, [block_kv, block_q]."""
    rules, pattern = problem.rules, problem.rules.block_sparse
    row, key = (np.s_[None, :], np.s_[:, None]) if problem.transposed else (np.s_[:, None], np.s_[None, :])
    slope = offset = None
    scale = _scale(problem, refs.k_scale, mine.kv_head)
    if refs.alibi_slopes is not None:
        slope = triton.load(refs.alibi_slopes.at[mine.head], mask=mine.real, other=0.0)[row]
    # A single query token with one pattern sees everything in its tiles: see walk.py.
    if pattern is not None and (problem.q_len > 1 or pattern.distinct_offsets(problem.group) > 1):
        offset = problem.pattern_offset(mine.head, mine.kv_head)
        offset = jnp.broadcast_to(offset, mine.head.shape)[row]
    key_at, query_at, drafts = position[key], query_at[row], draft_tree(position)
    if problem.transposed and drafts is not None:
        drafts = tree.Tree(*(x.T for x in drafts))
    products = logits.products(*(([keys], [q]) if problem.transposed else ([q], [keys])), None)
    products = products if key_scale is None else triton.rounded(products * key_scale[key])
    mods = mods.at(KEY, position, problem.max_len)
    score = None if mods.score is None else mods.score_of
    at = logits.positions(drafts, key_at, query_at)
    tile, scale = logits.shape(products, rules, scale, slope, *at, score)
    several = problem.q_len > 1
    for mask in logits.visible(rules, key_at, query_at, among_themselves=several, tree=drafts, offset=offset):
        tile = masking.apply(tile, mask)
    return logits.Shaped(mods.masked(tile), scale)


def _scale(problem: Problem, k_scale: Array | None, kv_head):
    """The logits' scale, without a page's."""
    if k_scale is None or quantization.is_by_page(k_scale):
        return problem.scale
    return problem.scale * triton.load(k_scale.at[kv_head])
