"""`blocksparse_attention` in plain jnp: works anywhere, in float32, with gradients.

It computes some queries of one sequence at a time against all its keys: memory grows with the longest sequence, not
with its square.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn._tile import logits, masking, softmax
from pallas_attn._tile.layout import to_nhd
from pallas_attn.ops.blocksparse_attention.layout import rows_of
from pallas_attn.ops.blocksparse_attention.operands import Operands
from pallas_attn.ops.blocksparse_attention.problem import Problem

MOST_QUERIES = 64


@jax.jit
def blocksparse_attention_xla(operands: Operands) -> tuple[jax.Array, jax.Array]:
    """As the kernels."""
    problem, query, layout = Problem.of(operands), operands.query, operands.layout
    block_q = 1 if problem.kinds == "decode" else min(layout.q_block_size, MOST_QUERIES)
    tokens, heads, num_seqs = problem.num_tokens, problem.num_heads, problem.num_seqs
    cu_q = operands.cu_q_lens if problem.kinds != "decode" else jnp.arange(num_seqs + 1)
    cu_q = jnp.clip(cu_q, 0, tokens).at[0].set(0)
    if problem.cache_layout is None:
        # In float32, so that gradients of keys and values, which sum over all slots, are rounded once.
        in_float32 = {name: getattr(operands, name).astype(jnp.float32) for name in ("key", "value")}
        operands, ends = dataclasses.replace(operands, **in_float32), operands.cu_k_lens
        assert ends is not None
        k_start, k_end = ends[:-1], ends[1:]
        bad_lens = (k_start < 0) | (k_end < k_start) | (k_end > problem.pool.num_pages)
    else:
        k_start, k_end = jnp.zeros(num_seqs, jnp.int32), operands.seq_lens
        assert k_end is not None
        bad_lens = (k_end < 0) | (k_end > problem.max_k_len)
    k_lens = jnp.where(bad_lens, 0, k_end - k_start)
    seen, bad = rows_of(layout)

    def attend(item: jax.Array):
        ends = cu_q[1:] // block_q + 2 * jnp.arange(1, num_seqs + 1)
        seq = jnp.sum(ends <= item)
        past_end = seq == num_seqs
        seq = jnp.minimum(seq, num_seqs - 1)
        before = k_lens[seq] - (cu_q[seq + 1] - cu_q[seq])
        first = before // block_q * block_q + (item - cu_q[seq] // block_q - 2 * seq) * block_q
        position = first + jnp.arange(block_q)
        real = (position >= before) & (position < k_lens[seq]) & ~past_end
        token = jnp.where(real, cu_q[seq] + position - before, tokens)
        q = query.at[token].get(mode="fill", fill_value=0).astype(jnp.float32)
        key_at = jnp.arange(problem.max_k_len)
        row = jnp.where(first >= 0, first // layout.q_block_size, 0)
        inside = (first < 0) | (row < seen.shape[1])
        row = jnp.minimum(row, seen.shape[1] - 1)
        blocks = jnp.minimum(key_at // layout.block_size, seen.shape[2] - 1)
        visible = seen[:, row][:, blocks][:, None] & masking.causal(key_at, position[:, None])
        # Places at a tile's end that have no query look at no key.
        visible = jnp.broadcast_to(visible & real[:, None], (heads, *visible.shape[1:]))
        # What no head of a group sees is zeroed: 0 * NaN is NaN.
        looked_at = jnp.any(visible.reshape(problem.pool.num_kv_heads, -1, problem.max_k_len), axis=1)
        keys, values, usable = _keys(operands, problem, seq, k_start[seq], k_lens[seq], looked_at)
        by_head = jnp.moveaxis(q, 1, 0)
        q = q.reshape(block_q, problem.pool.num_kv_heads, problem.group, -1)
        products = jnp.einsum("qhgd,khd->hgqk", q, keys, precision="highest")
        products = products.reshape(heads, block_q, -1)
        given = logits.shape(products, problem.rules, problem.scale, None, key_at, key_at)
        start = softmax.start((heads, block_q), values.shape[2])
        state, weights = softmax.rescale(start, masking.apply(given.logits, visible), given.factor)
        by_kv_head = weights.reshape(problem.pool.num_kv_heads, problem.group, block_q, -1)
        acc = jnp.einsum("hgqk,khd->hgqd", by_kv_head, values, precision="highest")
        out, lse = softmax.finish(state._replace(acc=acc.reshape(state.acc.shape)))
        # A query that sees nothing gets no gradient, even if its cotangent is NaN.
        out = jnp.where(lse.rest[..., None] == -jnp.inf, 0.0, out)
        wrong = (first >= 0) & bad[:, row]
        wrong = bad_lens[seq] | ~inside | wrong[:, None] | jnp.any(visible & ~usable, axis=2)
        # The query's gradient is NaN, too; keys and values get nothing from invalid rows.
        spoiled = jnp.float32(jnp.nan) * jnp.where(wrong[..., None], by_head, 0)
        out = jnp.where(wrong[..., None], spoiled, out)
        lse = jnp.stack([lse.maximum, jnp.where(wrong, spoiled[..., 0], lse.rest)], axis=-1)
        return token, jnp.moveaxis(out, 0, 1).astype(query.dtype), jnp.swapaxes(lse, 0, 1)

    num_items = tokens // block_q + 2 * num_seqs
    token, out, lse = lax.map(jax.checkpoint(attend), jnp.arange(num_items))
    results = (
        jnp.zeros(query.shape, query.dtype).at[token].set(out, mode="drop"),
        jnp.full((tokens, heads, 2), -jnp.inf).at[token].set(lse, mode="drop"),
    )
    return results


def _keys(operands: Operands, problem: Problem, seq, start, k_len, looked_at):
    """(keys, values [max_k_len, num_kv_heads, head_dim], whether the tokens' pages exist) of a sequence; 0 after its
    end and where not `looked_at` [num_kv_heads, max_k_len]."""
    position = jnp.arange(problem.max_k_len)
    held = position < k_len
    pool = problem.pool
    if operands.block_tables is None:
        page, offset = start + position, 0
        usable = jnp.ones(problem.max_k_len, bool)
    else:
        page = operands.block_tables[seq][position // pool.page_size]
        offset = position % pool.page_size
        usable = masking.usable_pages(page, pool.num_pages)
    page = jnp.clip(page, 0, pool.num_pages - 1)

    def read(which: Any) -> jax.Array:
        pages = getattr(operands, which)
        if problem.cache_layout is None:
            tokens = pages[page]
        else:
            tokens = to_nhd(pages, problem.cache_layout, which)[page, offset]
        return jnp.where((held & usable & looked_at).T[..., None], tokens.astype(jnp.float32), 0.0)

    return read("key"), read("value"), usable | ~held
