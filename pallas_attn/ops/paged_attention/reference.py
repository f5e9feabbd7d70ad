"""`paged_attention` in plain jnp: a loop over chunks of every sequence's pages with online softmax.

Memory beyond the output is one chunk of keys and values a sequence, whatever the table's width, and the loop runs
from the first token that any query sees to the end of the longest sequence, not over the whole table.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn._tile import masking, sharding, softmax
from pallas_attn._tile.layout import PoolShape, to_nhd

CHUNK_TOKENS = 256


@functools.partial(jax.jit, static_argnames=("pool", "scale", "layout", "rules"))
def paged_attention_xla(
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
) -> tuple[jax.Array, jax.Array]:
    """The same signature as the kernel's, without a config."""
    num_seqs, q_len, num_heads, head_dim = query.shape
    max_pages = block_tables.shape[1]
    heads, group = pool.num_kv_heads, num_heads // pool.num_kv_heads
    pages_per_chunk = min(max_pages, max(1, CHUNK_TOKENS // pool.page_size))
    chunk = pages_per_chunk * pool.page_size
    lengths = jnp.clip(seq_lens, 0, max_pages * pool.page_size)

    # Rows of a KV head: [num_seqs, num_kv_heads, q_len * group]
    def by_kv_head(per_head: jax.Array) -> jax.Array:
        """[num_heads] -> [num_kv_heads, rows, 1]"""
        per_row = jnp.broadcast_to(per_head.reshape(heads, 1, group), (heads, q_len, group))
        return per_row.reshape(heads, q_len * group, 1)

    rows = query.astype(jnp.float32).reshape(num_seqs, q_len, heads, group, head_dim)
    rows = jnp.moveaxis(rows, 1, 2).reshape(num_seqs, heads, q_len * group, head_dim)
    factor = scale * extras.get("k_scale", jnp.ones(heads, jnp.float32))[:, None, None]
    query_at = lengths[:, None] - q_len + jnp.repeat(jnp.arange(q_len), group)  # [num_seqs, rows]
    query_at = query_at[:, None, :, None]
    seen_from = masking.window_start(jnp.maximum(lengths - q_len, 0), rules.sliding_window)

    def visible(key_at: jax.Array, seen: jax.Array) -> jax.Array:
        mask = seen[:, None, None, :] & masking.causal(key_at, query_at)
        if rules.sliding_window is not None:
            mask &= masking.in_window(key_at, query_at, rules.sliding_window)
        if (pattern := rules.block_sparse) is not None:
            offset = pattern.offset(
                jnp.arange(num_heads),
                jnp.arange(num_heads) // group,
                num_heads=num_heads,
                num_kv_heads=heads,
            )
            mask &= pattern.kept(key_at, query_at + 1, by_kv_head(jnp.broadcast_to(offset, (num_heads,))))
        return mask

    def gather(cache: jax.Array, which, pages: jax.Array, seen: jax.Array) -> jax.Array:
        """[num_seqs, num_kv_heads, chunk, head_dim] float32; slots that hold nothing are 0, whatever is stored."""
        tile = to_nhd(cache.at[pages].get(mode="clip"), layout, which)
        tile = tile.reshape(num_seqs, chunk, heads, head_dim).astype(jnp.float32)
        return jnp.where(seen[:, None, :, None], jnp.moveaxis(tile, 2, 1), 0.0)

    def step(i: jax.Array, carry):
        state, bad = carry
        columns = i * pages_per_chunk + jnp.arange(pages_per_chunk)
        pages = block_tables.at[:, columns].get(mode="fill", fill_value=-1)
        position = i * chunk + jnp.arange(chunk)
        held = masking.within(position, lengths[:, None]) & (position >= seen_from[:, None])
        if rules.block_sparse is not None:
            # What no head keeps counts as absent: its pages may be anyone's.
            held &= visible(position, held).any(axis=(1, 2))
        usable = jnp.repeat(masking.usable_pages(pages, pool.num_pages), pool.page_size, axis=1)
        seen = held & usable
        keys, values = gather(key_cache, "key", pages, seen), gather(value_cache, "value", pages, seen)
        logits = jnp.einsum("bhrd,bhkd->bhrk", rows, keys, precision="highest") * factor
        logits = masking.cap(logits, rules.softcap)
        if "alibi_slopes" in extras:
            logits += masking.alibi(by_kv_head(extras["alibi_slopes"]), position, query_at)
        logits2 = masking.apply(logits * softmax.LOG2_E, visible(position, seen))
        state, weights = softmax.rescale(state, logits2)
        acc = state.acc + jnp.einsum("bhrk,bhkd->bhrd", weights, values, precision="highest")
        return state._replace(acc=acc), bad | jnp.any(held & ~usable, axis=1)

    state = softmax.start((num_seqs, heads, q_len * group), head_dim)
    bad = (seq_lens < 0) | (seq_lens > max_pages * pool.page_size)
    first_chunk = jnp.min(jnp.where(lengths > 0, seen_from, jnp.iinfo(jnp.int32).max)) // chunk
    last_chunk = (jnp.max(lengths, initial=0) + chunk - 1) // chunk
    axes = sharding.varying_axes(query, key_cache, value_cache, block_tables, seq_lens, extras)
    state, bad = lax.fori_loop(first_chunk, last_chunk, step, sharding.vary((state, bad), axes))
    if "sinks" in extras:
        sinks = by_kv_head(extras["sinks"])[None, ..., 0] * softmax.LOG2_E
        state = softmax.join(state, jnp.where((lengths > 0)[:, None, None], sinks, -jnp.inf))
    out, lse2 = softmax.finish(state)
    if "v_scale" in extras:
        out *= extras["v_scale"][:, None, None]

    def by_token(x: jax.Array) -> jax.Array:
        """[num_seqs, num_kv_heads, rows, ...] -> [num_seqs, q_len, num_heads, ...]"""
        x = jnp.moveaxis(x.reshape(num_seqs, heads, q_len, group, *x.shape[3:]), 2, 1)
        return x.reshape(num_seqs, q_len, num_heads, *x.shape[4:])

    out = softmax.poison(by_token(out), bad[:, None, None, None])
    lse = softmax.poison(by_token(softmax.natural_lse(lse2)), bad[:, None, None])
    return out.astype(query.dtype), lse
