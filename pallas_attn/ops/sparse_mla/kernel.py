"""Sparse MLA in Pallas: a program serves `block_q` heads of one query token, and walks over the ids it was given.

A tile's ids are looked up and their rows gathered, each 1152 or 656 contiguous bytes; from there on a tile is processed
as in `mla_decode`. Ids of -1, and those after the token's number of ids, read as 0 and are masked.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._call.configs import SplitKVConfig
from pallas_attn._call.pools import table_tokens
from pallas_attn._split import merge, result
from pallas_attn._tile import latent_tile, logits, masking, pages, rows, softmax, triton
from pallas_attn._tile.latents import LATENT_DIM
from pallas_attn._types import Array
from pallas_attn.ops.sparse_mla.config import SparseMLAConfig
from pallas_attn.ops.sparse_mla.operands import Operands
from pallas_attn.ops.sparse_mla.problem import FixedSplits, Problem, beside_sinks


@functools.partial(jax.jit, static_argnames=("config", "lowering"))
def sparse_mla_pallas(
    operands: Operands, *, config: SparseMLAConfig, lowering: triton.Lowering = "pallas"
) -> tuple[jax.Array, ...]:
    """(out [num_tokens, num_heads, 512] in query's dtype, lse [num_tokens, num_heads] float32) of operands by token,
    and with `max_logits` the maxima [num_tokens, num_heads] float32, for which `config.num_splits` must be 1."""
    num_tokens, num_heads, max_logits = operands.num_tokens, operands.num_heads, operands.max_logits
    problem = Problem(
        num_seqs=num_tokens,
        q_len=1,
        num_heads=num_heads,
        max_pages=1 if operands.block_tables is None else operands.block_tables.shape[1],
        pool=operands.pool,
        scale=operands.scale,
        config=SplitKVConfig(**vars(config)),
        topk=operands.topk,
        ids=operands.ids,
    )
    outputs = triton.kernel_call(
        functools.partial(_kernel, problem=problem),
        dataclasses.replace(
            operands,
            query=operands.query[:, None],
            latent_cache=operands.latent_cache[:, None, None],
            sinks=None,
        ),
        name="pallas_attn_sparse_mla",
        # Head blocks vary fastest, since they read the same rows.
        grid=(problem.q_blocks, config.num_splits, num_tokens),
        out_shape=[
            *result.shapes(problem, LATENT_DIM, operands.query.dtype),
            *([jax.ShapeDtypeStruct((num_tokens, 1, num_heads), jnp.float32)] if max_logits else []),
        ],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        lowering=lowering,
    )
    if not max_logits:
        outputs = merge.merge(
            outputs,
            (operands.topk_length,),
            functools.partial(FixedSplits, problem),
            name="pallas_attn_sparse_mla_combine",
            problem=problem,
            num_cut=num_tokens,
            most_splits=config.num_splits,
            lowering=lowering,
        )
    out, lse, *maximum = (array[:, 0] for array in outputs)
    return beside_sinks(out, lse, operands.sinks), lse, *maximum


def _kernel(refs: Operands, *out_refs, problem: Problem):
    head_block, split, token = (triton.program_id(axis) for axis in range(3))
    assert refs.topk_length is not None
    cut = FixedSplits(problem, refs.topk_length)
    stored, length = cut.length(token)
    begin = split * problem.split_ids

    # The first split of a token without ids is empty but still writes the output.
    @triton.when((begin < length) | (split == 0))
    def _():
        end = jnp.minimum(begin + problem.split_ids, length)
        mine = problem.rows_of(head_block)
        leading = rows.batched(mine, token)
        query = [rows.load(refs.query, mine, leading, chunk) for chunk in problem.query_chunks]
        state, bad = _walk_ids(query, refs, token, begin, end, problem)
        state = softmax.natural(state, softmax.LN_2)
        out, lse = softmax.finish(state)
        bad |= stored != length
        done = result.Result(mine, leading, problem.latent_chunks, out, lse).poisoned(bad)
        if refs.max_logits:
            *out_refs_, max_ref = out_refs
            result.store_row(done, max_ref, softmax.poison(state.maximum, bad))
        else:
            out_refs_ = out_refs
        result.store(done, out_refs_, token * problem.config.num_splits + split, cut.count(length) <= 1)


def _walk_ids(query, refs: Operands, token, begin, end, problem: Problem):
    """Online softmax of a token's query rows over its ids [begin, end); also whether any id was invalid."""
    pool, config = problem.pool, problem.config

    def logits_of(keys) -> jax.Array:
        """Base 2."""
        return logits.products(query, keys, problem.scale * softmax.LOG2_E)

    def step(i, carry):
        state, bad = carry
        position = begin + i * config.block_kv + jnp.arange(config.block_kv)
        listed = masking.within(position, end)
        index = triton.load(refs.indices.at[token + 0 * position, position], mask=listed, other=-1)
        row, held, unusable = _rows_of(index, refs.block_tables, token, problem)
        bad |= jnp.max(unusable.astype(jnp.int32)) > 0

        def read(chunk) -> jax.Array:
            return pages.gather(
                refs.latent_cache, "NHD", "key", row, 0 * row, 0, chunk, held, head_dim=pool.head_dim
            )

        keys = latent_tile.read(read, refs.latent_cache.dtype, problem.latent_chunks)

        def masked() -> jax.Array:
            return masking.apply(logits_of(keys), held[None, :])

        if not problem.asynchronous:
            tile = masked()
        else:
            # The branch is for Triton's choice of layouts: see mla_decode's kernel.
            whole = jnp.min(held.astype(jnp.int32)) > 0
            tile = lax.cond(whole, lambda: logits_of(keys), masked)
        state, weights = softmax.rescale(state, tile, 1.0)
        weights = weights.astype(keys[0].dtype)
        values = keys[:-1]  # all but the rotary chunk
        acc = tuple(acc + triton.dot(weights, chunk) for acc, chunk in zip(state.acc, values, strict=True))
        return state._replace(acc=acc), bad

    start = softmax.start((config.block_q,), tuple(size for _, size in problem.latent_chunks))
    num_tiles = problem.num_tiles(end - begin)
    return lax.fori_loop(np.int32(0), num_tiles, step, (start, jnp.bool_(False)))


def _rows_of(
    index: jax.Array, block_tables: Array | None, token, problem: Problem
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For each id: (row of the pool, 0 if there is none; whether there is one; whether it is missing but should
    exist)."""
    ids, num_rows = problem.ids, problem.pool.num_pages
    named = index != -1
    if ids.page_size is None:
        inside, row = masking.usable_pages(index, num_rows), index
    else:
        assert block_tables is not None
        in_table = masking.usable_pages(index, table_tokens(problem.max_pages, ids.page_size))
        position = jnp.where(in_table, index, 0)
        seq, column = token // ids.tokens_a_seq, position // ids.page_size
        page = pages.look_up(block_tables, seq, column, mask=in_table, other=-1)
        inside = masking.usable_pages(page, num_rows // ids.page_size)
        row = page * ids.page_size + position % ids.page_size
    unusable = jnp.zeros(index.shape, bool) if ids.skip_all_outside else named & ~inside
    return jnp.where(inside, row, 0), inside, unusable
