"""Ragged attention over pages in Pallas: prompts, chunks of prompts and decoding in one batch.

One program serves `block_q` query rows of one sequence and KV head over one split of the keys that they see. It finds
its sequence in cu_q_lens (blocks.py), walks the tiles of keys (spans.py) and keeps an online softmax in float32.
A block in one split is written to the output at once; otherwise the program leaves a float32 partial result for the
merge (splits.py). Sequences of few query rows and of many are served by two launches that differ in their tiles.
The new tokens' keys are in the pages too, or in arrays of their own: then a program walks first one, then the other.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call import sizes
from pallas_attn._call.operands import aliases, only
from pallas_attn._split import merge, result
from pallas_attn._tile import logits, narrow, quantization, rows, softmax, triton
from pallas_attn.mods.operands import has_score
from pallas_attn.ops.ragged_attention import seen, splits
from pallas_attn.ops.ragged_attention.blocks import CUTS, TOTAL, Block, Lens
from pallas_attn.ops.ragged_attention.config import RaggedAttentionConfig
from pallas_attn.ops.ragged_attention.operands import LENGTHS, Operands
from pallas_attn.ops.ragged_attention.problem import Problem
from pallas_attn.ops.ragged_attention.scores import Scores
from pallas_attn.ops.ragged_attention.sources import NewKeys, Pages
from pallas_attn.ops.ragged_attention.spans import Span
from pallas_attn.ops.ragged_attention.splits import Share, count


# jit, so that a model's layers share one traced and lowered kernel.
@functools.partial(jax.jit, static_argnames=("config", "only_short", "lowering"))
def ragged_attention_pallas(
    operands: Operands,
    *,
    config: RaggedAttentionConfig,
    only_short: bool = False,
    lowering: triton.Lowering = "pallas",
) -> tuple[jax.Array, jax.Array]:
    """(out [total_tokens, num_heads, value_dim] in `out_dtype`, lse float32); only_short: only the launch for sequences
    of few query rows; the others' rows are in the operands' out and lse already."""
    problem = Problem.of(operands, config)
    query = operands.query
    if operands.key is None:
        # Converted here, not in the kernel: a computed operand reaches asynchronous products from registers, again for
        # every tile of keys, while a loaded one stays in shared memory. Not for new tokens beside a quantised cache:
        # they are not quantised, and share the queries.
        cache_dtype, scales = operands.key_cache.dtype, (operands.k_scale, operands.v_scale)
        query = quantization.query_as(query, quantization.compute_dtype(query.dtype, cache_dtype, *scales))
    for one in [problem.launched(1)] if only_short else problem.each():
        mine = _dealt(query) if _deals_keys(one, operands, query.dtype) else query
        operands = _launch(one, dataclasses.replace(operands, query=mine), lowering)
    assert operands.out is not None
    assert operands.lse is not None
    return operands.out, operands.lse


def _deals_values(problem: Problem, operands: Operands, dtype: Any) -> bool:
    """Whether columns of cached values are dealt before their product (`narrow`)."""
    cache = operands.value_cache
    return cache is not None and narrow.deals(cache.dtype, dtype, problem.layout)


def _deals_keys(problem: Problem, operands: Operands, dtype: Any) -> bool:
    """Whether columns of keys are dealt like those of values, and the query's to match before the kernel: where keys,
    too, pass through shared memory as 16-bit numbers, for asynchronous products."""
    head_dim = problem.pool.head_dim
    whole = not any(sizes.reaches_beyond(chunk, head_dim) for chunk in sizes.chunks(head_dim))
    asynchronous = problem.rows >= 64
    return _deals_values(problem, operands, dtype) and whole and asynchronous and not problem.new_apart


def _dealt(query: jax.Array) -> jax.Array:
    chunks = sizes.chunks(query.shape[-1])
    return jnp.concatenate([narrow.dealt(query[..., at : at + size]) for at, size in chunks], axis=-1)


def _launch(problem: Problem, operands: Operands, lowering: triton.Lowering) -> Operands:
    """The operands with this launch's rows in `out` and `lse`, and with its notes for later launches."""
    name = f"pallas_attn_ragged_attention{'_short' if problem.is_short else ''}"
    final = (problem.num_tokens, problem.num_heads)
    out_shape = result.shapes(problem, problem.value_dim, operands.out_dtype, final=final)
    notes = [jax.ShapeDtypeStruct((size,), jnp.int32) for size in problem.notes.values()]
    operands = dataclasses.replace(operands, seen=seen.of_blocks(problem, operands))
    outputs = triton.kernel_call(
        functools.partial(_attend_kernel, problem=problem),
        operands,
        name=name,
        grid=problem.grid,
        out_shape=[*out_shape, *notes],
        num_warps=problem.config.num_warps,
        num_stages=problem.config.num_stages,
        input_output_aliases=aliases(operands, "out", "lse"),
        lowering=lowering,
    )
    noted = dict(zip(problem.notes, outputs[len(out_shape) :], strict=True))
    operands = dataclasses.replace(operands, **noted)
    out, lse = merge.merge(
        outputs[: len(out_shape)],
        (only(operands, *LENGTHS),),
        functools.partial(splits.decoded if problem.is_short else splits.RecordedCuts, problem),
        name=f"{name}_combine",
        problem=problem,
        num_cut=problem.num_cut,
        most_splits=problem.most_splits,
        counted=problem.is_short,
        rows_of=functools.partial(_rows_to_merge, problem),
        lowering=lowering,
    )
    return dataclasses.replace(operands, out=out, lse=lse)


def _rows_to_merge(problem: Problem, refs: Operands, place, flat: jax.Array):
    """A block's rows, numbered through all KV heads, and their leading indices in the final arrays."""
    block, _ = problem.find(Lens(problem.ragged, refs), place)
    mine = block.rows(flat // problem.rows, flat % problem.rows, problem.group, problem.rows)
    mine = mine._replace(real=mine.real & (flat < problem.pool.num_kv_heads * problem.rows))
    return mine, (block.first_token + mine.token,)


def _attend_kernel(refs: Operands, *out_refs, problem: Problem):
    problem = problem.with_rules(refs)
    lens = Lens(problem.ragged, refs)
    num_results = len(out_refs) - len(problem.notes)
    notes = dict(zip(problem.notes, out_refs[num_results:], strict=True))
    if TOTAL in notes:
        _count(problem, lens, notes[TOTAL])

    def serve(share: Share):
        block, mine = problem.find(lens, share.block)

        def note_splits(where, number):
            if CUTS in notes:
                noted = where & share.is_first & jnp.equal(share.kv_head, 0)
                triton.when(noted)(lambda: triton.store(notes[CUTS].at[share.block], number))

        note_splits(~mine, jnp.int32(0))

        @triton.when(mine)
        def _():
            in_pages, seq_len, bad = problem.lengths(lens, block)
            spans = problem.spans(block, in_pages, seq_len)
            begin, end, num_splits = share.tiles(count(spans))
            note_splits(True, num_splits)

            # The first split of a block that sees nothing is empty but still writes the output.
            @triton.when((begin < end) | share.is_first)
            def _():
                done = _attend(
                    problem, block, share.kv_head, spans, (begin, end), seq_len, refs,
                    with_sink=share.is_first & (seq_len > 0),
                )  # fmt: skip
                result.store(done.poisoned(bad), out_refs[:num_results], share.place, num_splits <= 1)

    splits.of_launch(problem)(refs).serve(serve)


def _count(problem: Problem, lens: Lens, total_ref) -> None:
    """The last program, which has the least to do, counts the blocks of the launch that comes next."""
    at_end = [jnp.equal(triton.program_id(axis), size - 1) for axis, size in enumerate(problem.grid)]

    @triton.when(at_end[0] & at_end[1])
    def _():
        triton.store(total_ref.at[np.int32(0)], problem.launched(0).count_blocks(lens))


def _attend(
    problem: Problem, block: Block, kv_head, spans: list[Span], share, seq_len, refs: Operands, *, with_sink
) -> result.Result:
    """Attends to the tiles `share` = (begin, end), counted through all spans."""
    mine = block.rows(kv_head, jnp.arange(problem.rows), problem.group, problem.rows)
    leading = (block.first_token + mine.token,)
    dtype = refs.query.dtype
    key_chunks, value_chunks = sizes.chunks(problem.pool.head_dim), sizes.chunks(problem.value_dim)
    queries = [rows.load(refs.query, mine, leading, chunk) for chunk in key_chunks]
    deals_keys = _deals_keys(problem, refs, dtype)
    scores = Scores(problem, block, seq_len, mine, refs)
    state = softmax.start((problem.rows,), tuple(size for _, size in value_chunks))
    exp2_below = functools.partial(triton.exp2_below, exp2=triton.exp2)

    def walk(state, span: Span, before, source: Any, scale, operand):
        def step(tile, state, ready):
            position = span.start(tile) + jnp.arange(span.block_kv)
            held = None if ready is not None else span.held(position)
            keys_of, key_scale, values_of = source.read(span.start(tile), position, ready, held)
            keys = [keys_of(chunk) for chunk in key_chunks]
            keys = [(narrow.dealt(key) if deals_keys else key).astype(dtype) for key in keys]
            given = scores(queries, keys, key_scale, position, held, scale)
            state, weights = softmax.rescale(state, given.logits, given.factor, exp2_below=exp2_below)
            weights = weights.astype(dtype)
            # Latents are keys and, without their rotary elements, values.
            values = keys if values_of is None else [operand(values_of(chunk)) for chunk in value_chunks]
            acc = tuple(
                a + triton.dot(weights, v) for a, v in zip(state.acc, values, strict=values_of is not None)
            )
            return state._replace(acc=acc)

        def ahead(tile):
            return source.ahead(span.start(tile))

        return span.walk(state, share[0] - before, share[1] - before, step, ahead)

    context = spans[0]
    cached = Pages(problem, block.seq, kv_head, refs)
    bad = cached.lead_nowhere(context, *share)
    if cached.looks_ahead:
        # Then no page is read, and ids need no further check.
        behind, end = (jnp.where(bad, 0, tile) for tile in (context.tiles.behind, context.tiles.end))
        context = context._replace(tiles=context.tiles._replace(behind=behind, end=end))
    scale = problem.scale
    if refs.k_scale is not None and not quantization.is_by_page(refs.k_scale):
        scale = scale * triton.load(refs.k_scale.at[kv_head])
    scored = has_score(refs.mods)
    natural_scale = logits.natural_scale(problem.rules, scale, refs.alibi_slopes, has_score=scored)

    def plain(values):
        return values.astype(dtype)

    if _deals_values(problem, refs, dtype):
        state = walk(state, context, 0, cached, scale, functools.partial(narrow.operand, dtype=dtype))
        state = state._replace(acc=tuple(narrow.in_order(chunk) for chunk in state.acc))
    else:
        state = walk(state, context, 0, cached, scale, plain)
    if refs.v_scale is not None and not quantization.is_by_page(refs.v_scale):
        v_scale = triton.load(refs.v_scale.at[kv_head])
        state = state._replace(acc=tuple(chunk * v_scale for chunk in state.acc))
    if problem.new_apart:
        # Logits of new tokens have another scale than those of quantised ones, unless both are natural already.
        new_scale = logits.natural_scale(problem.rules, problem.scale, refs.alibi_slopes)
        state = softmax.natural(state, natural_scale / new_scale)
        natural_scale = new_scale
        beside = NewKeys(block.first_token - spans[1].origin, kv_head, refs)
        state = walk(state, spans[1], spans[0].count, beside, problem.scale, plain)
    state = softmax.natural(state, natural_scale)
    if refs.sinks is not None:
        # The sink joins the softmax once: in the first split.
        sink = triton.load(refs.sinks.at[mine.head], mask=mine.real, other=0.0)
        state = softmax.join(state, jnp.where(with_sink, sink, np.float32(-np.inf)))
    out, lse = softmax.finish(state)
    if refs.out_scale is not None:
        per_unit = 1.0 / triton.load(refs.out_scale.at[np.int32(0)])
        out = tuple(chunk * per_unit for chunk in out)
    return result.Result(mine, leading, value_chunks, out, lse).poisoned(bad)
