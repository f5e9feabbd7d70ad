"""Split-KV paged decode attention in Pallas.

One program serves `block_q` query rows of one KV head over one split of one sequence. It walks the split's tiles of
`block_kv` tokens, looking each token's page up in the block table, and keeps an online softmax in float32.
A sequence in one split is written to the output at once; otherwise the program leaves a float32 partial result
(normalised, with its base-2 lse) for `combine.py`.

Rows: the query tokens of a sequence and the heads of a KV head's group are packed, row = q * group + g, so that
speculative decoding fills the tensor core's tile instead of adding programs.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._tile import masking, quantization, softmax, triton, walk
from pallas_attn._tile.layout import PoolShape, token_index
from pallas_attn.ops.paged_attention import combine
from pallas_attn.ops.paged_attention.config import PagedAttentionConfig
from pallas_attn.ops.paged_attention.problem import Problem


# jit, so that the layers of a model trace and lower one kernel, not one each.
@functools.partial(jax.jit, static_argnames=("pool", "scale", "layout", "rules", "config", "interpret"))
def paged_attention_pallas(
    query,
    key_cache,
    value_cache,
    block_tables,
    seq_lens,
    extras: dict[str, jax.Array],
    *,
    pool: PoolShape,
    scale: float,
    layout: str,
    rules: masking.Rules,
    config: PagedAttentionConfig,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """query [num_seqs, q_len, num_heads, head_dim] -> (out in query's dtype, lse float32).

    `extras` holds the arrays of the optional rules: alibi_slopes, sinks [num_heads]; k_scale, v_scale
    [num_kv_heads]; all float32.
    """
    num_seqs, q_len, num_heads, head_dim = query.shape
    problem = Problem(
        num_seqs=num_seqs,
        q_len=q_len,
        num_heads=num_heads,
        max_pages=block_tables.shape[1],
        pool=pool,
        scale=scale,
        config=config,
        layout=layout,
        rules=rules,
    )
    columns = q_len * num_heads  # a query token's head: what one output row belongs to
    outputs = [
        jax.ShapeDtypeStruct((num_seqs, columns, head_dim), query.dtype),
        jax.ShapeDtypeStruct((num_seqs, columns), jnp.float32),
    ]
    if config.num_splits > 1:
        outputs += [
            jax.ShapeDtypeStruct((config.num_splits, num_seqs, columns, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((config.num_splits, num_seqs, columns), jnp.float32),
        ]
    out, lse, *partial = triton.kernel_call(
        functools.partial(_attend_kernel, problem=problem),
        query.reshape(num_seqs, columns, head_dim),
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        extras,
        name="pallas_attn_paged_attention",
        # Programs of neighbouring KV heads start together: in the NHD layout they read neighbouring bytes. Splits
        # that most sequences do not have come last, when multiprocessors fall idle, rather than among the others.
        grid=(pool.num_kv_heads * problem.q_blocks, num_seqs, config.num_splits),
        out_shape=outputs,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )
    if partial:
        out, lse = combine.combine_splits(out, lse, partial, seq_lens, problem=problem, interpret=interpret)
    return out.reshape(query.shape), lse.reshape(num_seqs, q_len, num_heads)


class Rows(NamedTuple):
    """The query rows of a program, each array [block_q]."""

    real: jax.Array
    head: jax.Array
    column: jax.Array
    index: jax.Array  # of the query token, from 0 for the oldest


def _attend_kernel(
    query_ref,
    key_ref,
    value_ref,
    tables_ref,
    lens_ref,
    extra_refs,
    out_ref,
    lse_ref,
    *partial_refs,
    problem: Problem,
):
    head_block, seq, split = (triton.program_id(axis) for axis in range(3))
    kv_head = head_block // problem.q_blocks
    head_dim = problem.pool.head_dim

    stored_len = triton.load(lens_ref.at[seq])
    # No length is needed to find the query: it comes with the length, not after it and before the first page id.
    rows = _rows(problem, kv_head, head_block % problem.q_blocks)
    dim = jnp.arange(triton.tile_side(head_dim))[None, :]
    real = rows.real[:, None] & (dim < head_dim)
    tile = jnp.zeros(real.shape, jnp.int32)
    q = triton.load(query_ref.at[seq + tile, rows.column[:, None] + tile, dim + tile], mask=real, other=0.0)
    q = quantization.query_as(q, quantization.compute_dtype(query_ref.dtype, key_ref.dtype))

    seq_len = jnp.clip(stored_len, 0, problem.max_len)
    query_at = seq_len - problem.q_len + rows.index
    tiles = problem.walk(seq_len, kv_head)
    split_tiles = problem.split_tiles(tiles.num_tiles, lens_ref)
    begin = split * split_tiles
    end = jnp.minimum(begin + split_tiles, tiles.num_tiles)

    # Split 0 of an empty sequence has no tiles but still writes the output.
    @triton.when((begin < tiles.num_tiles) | (split == 0))
    def _():
        state = softmax.start(rows.head.shape, dim.shape[1])
        read = functools.partial(_read_tile, key_ref, value_ref, tables_ref, seq, kv_head, problem, q.dtype)
        weigh = functools.partial(_logits2, q, rows, query_at, extra_refs, kv_head, problem)
        state = _walk_tiles(state, tiles, begin, end, seq_len, read, weigh)
        if "sinks" in extra_refs:
            # A logit without a value that joins the softmax once: with the first split of a sequence.
            sink = triton.load(extra_refs["sinks"].at[rows.head], mask=rows.real, other=0.0) * softmax.LOG2_E
            state = softmax.join(state, jnp.where((split == 0) & (seq_len > 0), sink, np.float32(-np.inf)))
        out, lse2 = softmax.finish(state)
        if "v_scale" in extra_refs:
            out *= triton.load(extra_refs["v_scale"].at[kv_head])

        # A length that cannot be right makes its sequence NaN, as a page id does (see _walk_tiles).
        bad = stored_len != seq_len
        out, lse2 = softmax.poison(out, bad), softmax.poison(lse2, bad)

        def write_final():
            place = out_ref.at[seq + tile, rows.column[:, None] + tile, dim + tile]
            triton.store(place, out.astype(out_ref.dtype), mask=real)
            place = lse_ref.at[seq + 0 * rows.column, rows.column]
            triton.store(place, softmax.natural_lse(lse2), mask=rows.real)

        if not partial_refs:
            write_final()
            return
        partial_out_ref, partial_lse_ref = partial_refs
        one_split = tiles.num_tiles <= split_tiles
        triton.when(one_split)(write_final)

        @triton.when(~one_split)
        def _():
            place = partial_out_ref.at[split + tile, seq + tile, rows.column[:, None] + tile, dim + tile]
            triton.store(place, out, mask=real)
            place = partial_lse_ref.at[split + 0 * rows.column, seq + 0 * rows.column, rows.column]
            triton.store(place, lse2, mask=rows.real)


def _rows(problem: Problem, kv_head, q_block) -> Rows:
    row = jnp.arange(problem.config.block_q) + q_block * problem.config.block_q
    index = row // problem.group
    head = kv_head * problem.group + row % problem.group
    return Rows(row < problem.rows, head, index * problem.num_heads + head, index)


def _walk_tiles(state, tiles: walk.Walk, begin, end, seq_len, read, weigh):
    """The state after tiles [begin, end)."""

    def step(i, state):
        position, held = tiles.tokens(i, seq_len)
        keys, values, usable = read(tiles.start(i), held)
        logits = masking.apply(weigh(keys, position), held[None, :])
        # A page id that cannot be right makes its sequence NaN rather than quietly wrong. Marking the logits keeps
        # the ids where the compiler pipelines them; a flag beside the state would load them again, and wait.
        state, weights = softmax.rescale(state, softmax.poison(logits, (held & ~usable)[None, :]))
        return state._replace(acc=state.acc + triton.dot(weights.astype(values.dtype), values))

    return lax.fori_loop(begin, end, step, state)


def _read_tile(key_ref, value_ref, tables_ref, seq, kv_head, problem: Problem, dtype, start, held):
    """(keys, values [block_kv, dims], which tokens' pages exist): in `dtype`, not yet scaled, 0 where nothing was read.

    `start` is the tile's first token, `held` says which of its tokens hold something.
    """
    pool = problem.pool
    dim = jnp.arange(triton.tile_side(pool.head_dim))[None, :]
    tile = jnp.zeros((held.shape[0], dim.shape[1]), jnp.int32)
    column, offset = _slots(start, held.shape[0], pool.page_size)
    page = triton.load(tables_ref.at[seq + 0 * column, column], mask=held, other=0)
    usable = masking.usable_pages(page, pool.num_pages)
    # Elements that no token owns are read as 0: a NaN there would survive a weight of 0.
    inside = (held & usable)[:, None] & (dim < pool.head_dim)
    page, offset = page[:, None] + tile, offset[:, None] + tile

    def read(which: Any, ref):
        place = token_index(problem.layout, which, page, offset, kv_head + tile, dim + tile, ref.dtype)
        nothing = 0 if jnp.issubdtype(ref.dtype, jnp.integer) else 0.0
        return triton.load(ref.at[place], mask=inside, other=nothing).astype(dtype)

    return read("key", key_ref), read("value", value_ref), usable


def _slots(start, block_kv: int, page_size: int):
    """(column of the block table, offset in the page) of each token of a tile, whose start is a multiple of block_kv.

    Tiles and pages are powers of two as a rule, and then all but a scalar is the same for every tile.
    """
    token = jnp.arange(block_kv)
    if block_kv % page_size == 0:
        return start // page_size + token // page_size, token % page_size
    if page_size % block_kv == 0:
        return start // page_size + 0 * token, start % page_size + token
    return (start + token) // page_size, (start + token) % page_size


def _logits2(q, rows: Rows, query_at, extra_refs, kv_head, problem: Problem, keys, position) -> jax.Array:
    """Base-2 logits [block_q, block_kv] with every rule applied."""
    rules = problem.rules
    logits = triton.dot(q, keys, trans_b=True)
    scale = problem.scale
    if "k_scale" in extra_refs:
        scale = scale * triton.load(extra_refs["k_scale"].at[kv_head])
    key_at, query_at = position[None, :], query_at[:, None]
    if rules.softcap is not None or "alibi_slopes" in extra_refs:
        logits = masking.cap(logits * scale, rules.softcap)
        if "alibi_slopes" in extra_refs:
            slope = triton.load(extra_refs["alibi_slopes"].at[rows.head], mask=rows.real, other=0.0)
            logits += masking.alibi(slope[:, None], key_at, query_at)
        scale = 1.0
    logits *= scale * softmax.LOG2_E

    # One query token with one pattern sees everything that its tiles hold: see walk.py.
    if problem.q_len > 1:
        logits = masking.apply(logits, masking.causal(key_at, query_at))
        if rules.sliding_window is not None:
            logits = masking.apply(logits, masking.in_window(key_at, query_at, rules.sliding_window))
    pattern = rules.block_sparse
    if pattern is not None and (problem.q_len > 1 or pattern.distinct_offsets(problem.group) > 1):
        heads = {"num_heads": problem.num_heads, "num_kv_heads": problem.pool.num_kv_heads}
        offset = jnp.broadcast_to(pattern.offset(rows.head, kv_head, **heads), rows.head.shape)[:, None]
        logits = masking.apply(logits, pattern.kept(key_at, query_at + 1, offset))
    return logits
