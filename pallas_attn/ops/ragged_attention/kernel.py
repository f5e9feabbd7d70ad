"""Ragged attention over pages in Pallas: prompts, chunks of prompts and decoding in one batch.

One program serves `block_q` query rows of one sequence and KV head over one piece of the keys that they see. It finds
its sequence in cu_q_lens (blocks.py), walks the tiles of keys (spans.py) and keeps an online softmax in float32.
A block in one piece is written to the output at once; otherwise the program leaves a float32 partial result for the
merge. Sequences of few query rows and of many are served by two launches that differ in their tiles.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._tile import logits, masking, merge, pages, quantization, result, rows, softmax, triton
from pallas_attn._tile.layout import PoolShape
from pallas_attn._tile.pieces import TO_NEAREST, ceil_div
from pallas_attn.ops.ragged_attention import blocks
from pallas_attn.ops.ragged_attention.blocks import Block
from pallas_attn.ops.ragged_attention.config import RaggedAttentionConfig
from pallas_attn.ops.ragged_attention.problem import Problem
from pallas_attn.ops.ragged_attention.spans import Span, span

CHECKED_IDS = 512  # page ids that are looked at in one step before the walk


# jit, so that the layers of a model trace and lower one kernel, not one each.
@functools.partial(
    jax.jit, static_argnames=("pool", "value_dim", "scale", "layout", "rules", "causal", "config", "interpret")
)
def ragged_attention_pallas(
    query,
    key_cache,
    value_cache,
    block_tables,
    seq_lens,
    cu_q_lens,
    num_seqs,
    extras: dict[str, jax.Array],
    *,
    pool: PoolShape,
    value_dim: int,
    scale: float,
    layout: str,
    rules: masking.Rules,
    causal: bool,
    config: RaggedAttentionConfig,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """query [total_tokens, num_heads, head_dim] -> (out in query's dtype, lse float32).

    `extras` as of paged attention's kernel; `num_seqs` int32 [1].
    """
    num_tokens, num_heads, _ = query.shape
    problem = Problem(
        num_tokens=num_tokens,
        num_seqs=block_tables.shape[0],
        num_heads=num_heads,
        max_pages=block_tables.shape[1],
        pool=pool,
        value_dim=value_dim,
        scale=scale,
        layout=layout,
        rules=rules,
        causal=causal,
        launches=(config.long, config.short) if config.short else (config.long,),
    )
    lens = {"seq_lens": seq_lens, "cu_q_lens": cu_q_lens, "num_seqs": num_seqs}
    if "sliding_window" in extras:
        lens["sliding_window"] = extras["sliding_window"]
    others = {name: array for name, array in extras.items() if name not in lens}
    done = None
    for one in problem.each():
        done = _launch(one, (query, key_cache, value_cache, block_tables), lens, others, done, interpret)
    assert done is not None
    return done


def _launch(problem: Problem, arrays, lens, others, done, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """Fills in the rows of this launch's sequences; `done` is (out, lse) with those of others', or None."""
    query = arrays[0]
    name = f"pallas_attn_ragged_attention{'_short' if problem.is_short else ''}"
    aliases = {}
    if done is not None:
        count = len(jax.tree.leaves((arrays, lens, others)))
        aliases = {count: 0, count + 1: 1}
    outputs = triton.kernel_call(
        functools.partial(_attend_kernel, problem=problem),
        *arrays,
        lens,
        others,
        done,
        name=name,
        # The programs of a KV head start together, and what they read stays in the L2. Pieces that most blocks do not
        # have come last.
        grid=(problem.num_cut, problem.pool.num_kv_heads, problem.config.num_splits),
        out_shape=_shapes(problem, query.dtype),
        num_warps=problem.config.num_warps,
        num_stages=problem.config.num_stages,
        input_output_aliases=aliases,
        interpret=interpret,
    )
    return merge.merge(
        outputs,
        (lens,),
        functools.partial(BlockPieces, problem),
        name=f"{name}_combine",
        problem=problem,
        most_pieces=problem.config.num_splits,
        rows_of=functools.partial(_rows_to_merge, problem),
        interpret=interpret,
    )


def _shapes(problem: Problem, dtype: Any) -> list[jax.ShapeDtypeStruct]:
    final = (problem.num_tokens, problem.num_heads)
    shapes = [jax.ShapeDtypeStruct((*final, problem.value_dim), dtype), jax.ShapeDtypeStruct(final, jnp.float32)]
    if problem.num_pieces:
        partial = (problem.num_pieces, problem.pool.num_kv_heads, problem.rows)
        shapes.append(jax.ShapeDtypeStruct((*partial, problem.value_dim), jnp.float32))
        shapes.append(jax.ShapeDtypeStruct(partial, jnp.float32))
    return shapes


def _attend_kernel(
    query_ref, key_ref, value_ref, tables_ref, lens_refs, extra_refs, _done, *out_refs, problem: Problem
):
    place, kv_head, split = (triton.program_id(axis) for axis in range(3))
    # The last rows of a prompt see the most keys: what takes longest begins first.
    place = problem.num_cut - 1 - place
    block, mine = _find(problem, lens_refs, place)

    @triton.when(mine)
    def _():
        _attend(
            _with_window(problem, lens_refs), block, place, kv_head, split,
            query_ref, (key_ref, value_ref, tables_ref), lens_refs, extra_refs, out_refs,
        )  # fmt: skip


def _with_window(problem: Problem, lens_refs: dict[str, Any]) -> Problem:
    """A window that is known at run time only is one of the rules all the same."""
    if "sliding_window" not in lens_refs:
        return problem
    return problem.with_window(triton.load(lens_refs["sliding_window"].at[np.int32(0)]))


def _attend(problem, block: Block, place, kv_head, split, query_ref, pool_refs, lens_refs, extra_refs, out_refs):
    key_ref, value_ref, tables_ref = pool_refs
    stored_len, seq_len = _length(problem, lens_refs, block)
    mine = _rows(problem, block, kv_head, jnp.arange(problem.rows))
    leading = (block.first_token + mine.token,)
    compute = quantization.compute_dtype(query_ref.dtype, key_ref.dtype)
    chunks = rows.chunks(problem.pool.head_dim)
    queries = [
        quantization.query_as(rows.load(query_ref, mine, leading, chunk), compute) for chunk in chunks
    ]
    query_at = seq_len - block.q_len + mine.token
    context = _span(problem, block, seq_len)
    piece_tiles = BlockPieces(problem, lens_refs).tiles(context.count)
    begin = split * piece_tiles

    # The first piece of a block that sees nothing has no tiles but still writes the output.
    @triton.when((begin < context.count) | (split == 0))
    def _():
        value_chunks = rows.chunks(problem.value_dim)
        end = jnp.minimum(begin + piece_tiles, context.count)
        bad = (stored_len != seq_len) | _leads_nowhere(tables_ref, block.seq, context, begin, end, problem)

        def step(tile, state, *, whole: bool):
            start = context.start(tile)
            position = start + jnp.arange(context.block_kv)
            held = None if whole else context.held(position)
            read = _reader(tables_ref, block.seq, start, held, kv_head, problem, compute)
            keys = [read("key", key_ref, chunk, problem.pool.head_dim) for chunk in chunks]
            tile_logits, factor = _logits(queries, keys, mine, query_at, position, held, extra_refs, problem)
            state, weights = softmax.rescale(state, tile_logits, factor)
            values = [read("value", value_ref, chunk, problem.value_dim) for chunk in value_chunks]
            weights = weights.astype(compute)
            acc = tuple(a + triton.dot(weights, v) for a, v in zip(state.acc, values, strict=True))
            return state._replace(acc=acc)

        state = softmax.start((problem.rows,), tuple(size for _, size in value_chunks))
        state = context.walk(state, begin, end, step)
        if "sinks" in extra_refs:
            # A logit without a value that joins the softmax once: with the first piece.
            sink = triton.load(extra_refs["sinks"].at[mine.head], mask=mine.real, other=0.0) * softmax.LOG2_E
            state = softmax.join(state, jnp.where((split == 0) & (seq_len > 0), sink, np.float32(-np.inf)))
        out, lse2 = softmax.finish(state)
        if "v_scale" in extra_refs:
            v_scale = triton.load(extra_refs["v_scale"].at[kv_head])
            out = tuple(chunk * v_scale for chunk in out)
        done = result.Result(mine, leading, value_chunks, out, lse2).poisoned(bad)
        piece, one_piece = place * problem.config.num_splits + split, context.count <= piece_tiles
        result.store(done, out_refs, piece, one_piece)


def _find(problem: Problem, lens_refs: dict[str, Any], place) -> tuple[Block, jax.Array]:
    """The block at a place, and whether this launch serves it."""
    ragged, group = problem.ragged, problem.group
    cu_ref = lens_refs["cu_q_lens"]
    num_seqs = jnp.clip(triton.load(lens_refs["num_seqs"].at[np.int32(0)]), 0, ragged.num_seqs)

    def bound(index):
        stored = triton.load(cu_ref.at[jnp.minimum(index, ragged.num_seqs)])
        return ragged.bound(index, stored, num_seqs)

    if problem.is_short:
        seq, first_row = place, 0 * place
    else:
        index = jnp.arange(triton.next_power_of_2(ragged.num_seqs + 1))
        first_block = ragged.first_block(index, bound(index), problem.rows)
        seq = jnp.sum(((first_block <= place) & (index <= num_seqs)).astype(jnp.int32)) - 1
        first_row = (place - ragged.first_block(seq, bound(seq), problem.rows)) * problem.rows
    first, end = bound(seq), bound(seq + 1)
    block = Block(seq, seq >= num_seqs, first, jnp.maximum(end - first, 0), first_row)
    num_rows = block.q_len * group
    if problem.is_short:
        return block, ~block.is_padding & (num_rows > 0) & (num_rows <= problem.rows)
    return block, block.has_rows(group) & (block.is_padding | (num_rows > problem.short_rows))


def _length(problem: Problem, lens_refs: dict[str, Any], block: Block) -> tuple[jax.Array, jax.Array]:
    """(as stored, clamped to what the table holds); 0 for padding."""
    stored = triton.load(lens_refs["seq_lens"].at[jnp.minimum(block.seq, problem.num_seqs - 1)])
    stored = jnp.where(block.is_padding, 0, stored)
    return stored, jnp.clip(stored, 0, problem.max_len)


def _rows(problem: Problem, block: Block, kv_head, index: jax.Array) -> rows.Rows:
    """Rows of a block, by their index in it."""
    row = block.first_row + index
    group = problem.group
    real = (index < problem.rows) & (row < block.q_len * group)
    return rows.Rows(index, real, kv_head, row // group, kv_head * group + row % group)


def _span(problem: Problem, block: Block, seq_len) -> Span:
    first_position = seq_len - block.q_len
    return span(
        first_position + block.first_query(problem.group),
        first_position + block.last_query(problem.group, problem.rows),
        0,
        seq_len,
        causal=problem.causal,
        window=problem.rules.sliding_window,
        block_kv=problem.config.block_kv,
    )


def _leads_nowhere(tables_ref, seq, context: Span, begin, end, problem: Problem) -> jax.Array:
    """Whether a page id that tiles [begin, end) use is none of the pool's.

    Looked at ahead of the walk, in which ids are only clamped: what a flag costs in every tile this costs once.
    """
    page_size = problem.pool.page_size
    first = jnp.maximum(context.start(begin), context.seen_from) // page_size
    last = ceil_div(jnp.minimum(context.start(end), context.end), page_size)

    def look(i, bad):
        column = first + i * CHECKED_IDS + jnp.arange(CHECKED_IDS)
        page = pages.look_up(tables_ref, seq, column, mask=column < last, other=0)
        return bad | (~masking.usable_pages(page, problem.pool.num_pages)).astype(jnp.int32)

    steps = ceil_div(last - first, CHECKED_IDS)
    return jnp.max(jax.lax.fori_loop(0, steps, look, jnp.zeros(CHECKED_IDS, jnp.int32))) > 0


def _reader(tables_ref, seq, start, held, kv_head, problem: Problem, dtype):
    """read(which, ref, chunk, dim) -> elements of the tile's tokens, [block_kv, size] in `dtype`, not yet scaled.

    `held` says which of its tokens hold something, None that all do; the others are 0.
    """
    pool = problem.pool
    column, offset = pages.slots(start, problem.config.block_kv, pool.page_size)
    page = pages.look_up(tables_ref, seq, column, **({} if held is None else {"mask": held, "other": 0}))
    page = jnp.clip(page, 0, pool.num_pages - 1)

    def read(which: Any, ref, chunk, dim):
        tile = pages.gather(ref, problem.layout, which, page, offset, kv_head, chunk, held, head_dim=dim)
        return tile.astype(dtype)

    return read


def _logits(queries, keys, mine: rows.Rows, query_at, position, held, extra_refs, problem: Problem):
    """(logits [block_q, block_kv] with every rule applied, what makes them base 2: a factor, or None if they are);
    without `held` every row sees every key."""
    rules, slope, scale = problem.rules, None, problem.scale
    if "k_scale" in extra_refs:
        scale = scale * triton.load(extra_refs["k_scale"].at[mine.kv_head])
    if "alibi_slopes" in extra_refs:
        slope = triton.load(extra_refs["alibi_slopes"].at[mine.head], mask=mine.real, other=0.0)[:, None]
    key_at, query_at = position[None, :], query_at[:, None]
    factor = logits.factor(rules, scale, slope)
    if rules.softcap is None and slope is None:
        tile = logits.products(queries, keys, 1.0)
    else:
        scaled = logits.products(queries, keys, factor)
        tile, factor = logits.shape(scaled, rules, slope, key_at, query_at), None
    if held is None:
        return tile, factor
    tile = masking.apply(tile, held[None, :])
    if problem.causal:
        tile = masking.apply(tile, masking.causal(key_at, query_at))
    if rules.sliding_window is not None:
        tile = masking.apply(tile, masking.in_window(key_at, query_at, rules.sliding_window))
    return tile, factor


class BlockPieces:
    """How the keys of a block are cut: into as many equal pieces as it has fair shares of all the launch's work."""

    def __init__(self, problem: Problem, lens_refs: dict[str, Any]):
        self._problem, self._lens_refs = _with_window(problem, lens_refs), lens_refs

    def tiles(self, num_tiles: jax.Array) -> jax.Array:
        """Tiles in a piece of a block that walks `num_tiles`, at least 1."""
        config = self._problem.config
        if config.num_splits == 1:
            return jnp.maximum(num_tiles, 1)
        share = jnp.maximum(self._share(), config.min_split_tokens / config.block_kv)
        wanted = jnp.floor(num_tiles.astype(jnp.float32) / share + TO_NEAREST).astype(jnp.int32)
        return jnp.maximum(ceil_div(num_tiles, jnp.clip(wanted, 1, config.num_splits)), 1)

    def _share(self) -> jax.Array:
        """Tiles that each of the target's programs would get if blocks could be cut anywhere: float32 scalar."""
        problem, ragged, group = self._problem, self._problem.ragged, self._problem.group
        num_seqs = jnp.clip(triton.load(self._lens_refs["num_seqs"].at[np.int32(0)]), 0, ragged.num_seqs)
        index = jnp.arange(triton.next_power_of_2(ragged.num_seqs))
        real = index < num_seqs

        def of(name: str, index):
            return triton.load(self._lens_refs[name].at[index], mask=real, other=0)

        first, end = (
            ragged.bound(i, of("cu_q_lens", jnp.minimum(i, ragged.num_seqs)), num_seqs) for i in (index, index + 1)
        )
        q_len = jnp.where(real, jnp.maximum(end - first, 0), 0)
        seq_len = jnp.clip(of("seq_lens", jnp.minimum(index, ragged.num_seqs - 1)), 0, problem.max_len)
        num_rows = q_len * group
        served = (num_rows <= problem.rows) if problem.is_short else (num_rows > problem.short_rows)
        # Where rows differ in what they see, the middle one tells for all.
        zero = 0 * q_len
        middle = Block(index, ~real, first, q_len, zero)
        middle = middle._replace(first_row=q_len // 2 * group // problem.rows * problem.rows)
        tiles = jnp.where(served, blocks.num_blocks(q_len, group, problem.rows), 0) * jnp.where(
            served, _span(problem, middle, seq_len).count, 0
        )
        per_program = problem.pool.num_kv_heads / problem.config.target_programs
        return jnp.sum(tiles.astype(jnp.float32)) * per_program

    def of(self, place) -> tuple[jax.Array, jax.Array]:
        problem = self._problem
        block, mine = _find(problem, self._lens_refs, place)
        num_tiles = _span(problem, block, _length(problem, self._lens_refs, block)[1]).count
        count = jnp.where(mine, ceil_div(num_tiles, self.tiles(num_tiles)), 0)
        return place * problem.config.num_splits, count


def _rows_to_merge(problem: Problem, lens_refs: dict[str, Any], place, flat: jax.Array):
    """The rows of a block numbered through all KV heads, and their leading indices in the final arrays."""
    block, _ = _find(problem, lens_refs, place)
    mine = _rows(problem, block, flat // problem.rows, flat % problem.rows)
    mine = mine._replace(real=mine.real & (flat < problem.pool.num_kv_heads * problem.rows))
    return mine, (block.first_token + mine.token,)
