"""`mla_decode` in plain jnp: a loop over chunks of every sequence's pages with online softmax.

Memory beyond the output is one chunk of the latent cache a sequence, whatever the table's width, and the loop stops
at the longest sequence, not at the table's end.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn._tile import masking, sharding, softmax
from pallas_attn._tile.layout import pool_shape

LATENT_DIM = 512
CHUNK_TOKENS = 256


def mla_decode_xla(
    query, latent_cache, block_tables, seq_lens, schedule=None, *, scale: float, causal: bool
) -> tuple[jax.Array, jax.Array]:
    """(out in query's dtype, lse float32). A schedule says who does the work, not what it is: it is ignored here."""
    del schedule
    num_seqs, q_len, num_heads, head_dim = query.shape
    pool = pool_shape(latent_cache, "NHD")
    max_pages = block_tables.shape[1]
    group = num_heads // pool.num_kv_heads
    pages_per_chunk = min(max_pages, max(1, CHUNK_TOKENS // pool.page_size))
    chunk = pages_per_chunk * pool.page_size

    lengths = jnp.clip(seq_lens, 0, max_pages * pool.page_size)
    # [num_seqs, num_kv_heads, q_len, group, head_dim]
    grouped = (
        query.astype(jnp.float32).reshape(num_seqs, q_len, pool.num_kv_heads, group, head_dim).swapaxes(1, 2)
    )
    grouped = grouped * (scale * softmax.LOG2_E)
    # Query token i is the sequence's token length - q_len + i, and with `causal` sees itself and what is before it.
    hidden = q_len - 1 - jnp.arange(q_len) if causal else jnp.zeros(q_len, jnp.int32)
    row_end = lengths[:, None] - hidden[None, :]

    def step(i: jax.Array, carry):
        state, bad = carry
        columns = i * pages_per_chunk + jnp.arange(pages_per_chunk)
        pages = block_tables.at[:, columns].get(mode="fill", fill_value=-1)
        positions = i * chunk + jnp.arange(chunk)
        held = masking.within(positions[None, :], lengths[:, None])
        usable = jnp.repeat(masking.usable_pages(pages, pool.num_pages), pool.page_size, axis=1)
        seen = held & usable
        keys = latent_cache.at[pages].get(mode="clip").reshape(num_seqs, chunk, pool.num_kv_heads, head_dim)
        # Slots that hold nothing are 0, whatever is stored.
        keys = jnp.where(seen[:, :, None, None], keys.astype(jnp.float32), 0.0)
        logits2 = jnp.einsum("bhsgd,bkhd->bhsgk", grouped, keys, precision="highest")
        visible = seen[:, None, :] & masking.within(positions[None, None, :], row_end[:, :, None])
        logits2 = masking.apply(logits2, visible[:, None, :, None, :])
        state, weights = softmax.rescale(state, logits2)
        values = keys[..., :LATENT_DIM]
        acc = state.acc + jnp.einsum("bhsgk,bkhd->bhsgd", weights, values, precision="highest")
        return state._replace(acc=acc), bad | jnp.any(held & ~usable, axis=1)

    start = softmax.start((num_seqs, pool.num_kv_heads, q_len, group), LATENT_DIM)
    bad = (seq_lens < 0) | (seq_lens > max_pages * pool.page_size)
    num_chunks = (jnp.max(lengths, initial=0) + chunk - 1) // chunk
    axes = sharding.varying_axes(query, latent_cache, block_tables, seq_lens)
    state, bad = lax.fori_loop(0, num_chunks, step, sharding.vary((start, bad), axes))
    out, lse2 = softmax.finish(state)
    bad = bad[:, None, None, None]
    out = softmax.poison(out.swapaxes(1, 2), bad[..., None]).reshape(num_seqs, q_len, num_heads, LATENT_DIM)
    # [num_seqs, num_kv_heads, q_len, group] -> [num_seqs, num_heads, q_len]
    lse = softmax.poison(softmax.natural_lse(lse2), bad).swapaxes(2, 3).reshape(num_seqs, num_heads, q_len)
    return out.astype(query.dtype), lse
