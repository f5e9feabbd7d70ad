"""`paged_attention` in plain jnp: a loop over chunks of every sequence's pages with online softmax.

Memory beyond the output is one chunk of keys and values a sequence, whatever the table's width, and the loop stops
at the longest sequence, not at the table's end.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn import _masking, _softmax
from pallas_attn.ops.kv_cache.layout import pool_shape

CHUNK_TOKENS = 256


def paged_attention_xla(
    query, key_cache, value_cache, block_tables, seq_lens, *, scale: float, layout: str, config=None
) -> tuple[jax.Array, jax.Array]:
    """(out in query's dtype, lse float32). `config` belongs to the kernels and is ignored here by design of the
    caller, which refuses it."""
    num_seqs, num_heads, head_dim = query.shape
    pool = pool_shape(key_cache, layout)
    max_pages = block_tables.shape[1]
    group = num_heads // pool.num_kv_heads
    pages_per_chunk = min(max_pages, max(1, CHUNK_TOKENS // pool.page_size))
    chunk = pages_per_chunk * pool.page_size

    lengths = jnp.clip(seq_lens, 0, max_pages * pool.page_size)
    grouped = query.astype(jnp.float32).reshape(num_seqs, pool.num_kv_heads, group, head_dim)
    grouped = grouped * (scale * _softmax.LOG2_E)

    def gather(cache: jax.Array, pages: jax.Array, seen: jax.Array) -> jax.Array:
        """[num_seqs, num_kv_heads, chunk, head_dim] float32; slots that hold nothing are 0, whatever is stored."""
        tile = cache.at[pages].get(mode="clip")
        tile = jnp.moveaxis(tile, 3, 1) if layout == "NHD" else jnp.moveaxis(tile, 2, 1)
        tile = tile.reshape(num_seqs, pool.num_kv_heads, chunk, head_dim).astype(jnp.float32)
        return jnp.where(seen[:, None, :, None], tile, 0.0)

    def step(i: jax.Array, carry):
        state, bad = carry
        columns = i * pages_per_chunk + jnp.arange(pages_per_chunk)
        pages = block_tables.at[:, columns].get(mode="fill", fill_value=-1)
        positions = i * chunk + jnp.arange(chunk)
        held = _masking.within(positions[None, :], lengths[:, None])
        usable = jnp.repeat(_masking.usable_pages(pages, pool.num_pages), pool.page_size, axis=1)
        seen = held & usable
        keys, values = gather(key_cache, pages, seen), gather(value_cache, pages, seen)
        logits2 = jnp.einsum("bhgd,bhkd->bhgk", grouped, keys, precision="highest")
        logits2 = _masking.apply(logits2, seen[:, None, None, :])
        state, weights = _softmax.rescale(state, logits2)
        acc = state.acc + jnp.einsum("bhgk,bhkd->bhgd", weights, values, precision="highest")
        return state._replace(acc=acc), bad | jnp.any(held & ~usable, axis=1)

    start = _softmax.start((num_seqs, pool.num_kv_heads, group), head_dim)
    bad = (seq_lens < 0) | (seq_lens > max_pages * pool.page_size)
    num_chunks = (jnp.max(lengths, initial=0) + chunk - 1) // chunk
    state, bad = lax.fori_loop(0, num_chunks, step, (start, bad))
    out, lse2 = _softmax.finish(state)
    out = _softmax.poison(out.reshape(query.shape), bad[:, None, None])
    lse = _softmax.poison(_softmax.natural_lse(lse2).reshape(num_seqs, num_heads), bad[:, None])
    return out.astype(query.dtype), lse
