"""Sparse MLA in plain jnp: some query tokens at a time, with their rows gathered."""

import jax
import jax.numpy as jnp

from pallas_attn._call import symbolic
from pallas_attn._call.pools import table_tokens
from pallas_attn._tile import masking, softmax
from pallas_attn._tile.latents import BYTES, LATENT_DIM
from pallas_attn.ops.latent_cache.format import dequantized
from pallas_attn.ops.sparse_mla.operands import Operands
from pallas_attn.ops.sparse_mla.problem import beside_sinks

TOKENS_AT_ONCE = 8


@jax.jit
def sparse_mla_xla(operands: Operands) -> tuple[jax.Array, ...]:
    """As `sparse_mla_pallas`."""
    query, pool, indices, tables = (
        operands.query, operands.latent_cache, operands.indices, operands.block_tables
    )  # fmt: skip
    ids, scale, lengths = operands.ids, operands.scale, operands.topk_length
    assert lengths is not None
    num_tokens, _, _ = query.shape
    topk, num_rows = indices.shape[1], pool.shape[0]
    usable_lengths = jnp.clip(lengths, 0, topk)
    listed = masking.within(jnp.arange(topk), usable_lengths[:, None])
    if ids.page_size is None or tables is None:
        inside, row = masking.usable_pages(indices, num_rows), indices
    else:
        in_table = masking.usable_pages(indices, table_tokens(tables.shape[1], ids.page_size))
        position = jnp.where(in_table, indices, 0)
        of_token = jnp.repeat(tables, ids.tokens_a_seq, axis=0)
        page = jnp.take_along_axis(of_token, position // ids.page_size, axis=1)
        inside = in_table & masking.usable_pages(page, num_rows // ids.page_size)
        row = page * ids.page_size + position % ids.page_size
    unusable = listed & ~inside & (indices != -1) & (not ids.skip_all_outside)
    bad = jnp.any(unusable, axis=1) | (lengths != usable_lengths)
    held = listed & inside

    def attend(one: tuple[jax.Array, ...]) -> tuple[jax.Array, softmax.Lse, jax.Array]:
        query, row, held = one
        keys = pool[row]
        if pool.dtype == BYTES:
            keys = dequantized(keys).astype(jnp.bfloat16)  # as the kernels have them
        keys = jnp.where(held[:, None], keys.astype(jnp.float32), 0.0)
        scaled = query.astype(jnp.float32) * scale
        logits = masking.apply(jnp.einsum("hd,kd->hk", scaled, keys, precision="highest"), held[None, :])
        state, weights = softmax.rescale(softmax.start((query.shape[0],), LATENT_DIM), logits)
        acc = jnp.einsum("hk,kd->hd", weights, keys[:, :LATENT_DIM], precision="highest")
        out, lse = softmax.finish(state._replace(acc=acc))
        return out, lse, state.maximum

    rows = jnp.where(held, row, 0)
    batch = None if symbolic.is_open(num_tokens) else min(TOKENS_AT_ONCE, num_tokens)
    out, lse, maximum = jax.lax.map(attend, (query, rows, held), batch_size=batch)
    out = softmax.poison(out, bad[:, None, None]).astype(query.dtype)
    lse, maximum = (softmax.poison(x, bad[:, None]) for x in (lse.natural(), maximum))
    out = beside_sinks(out, lse, operands.sinks)
    return (out, lse, maximum) if operands.max_logits else (out, lse)
