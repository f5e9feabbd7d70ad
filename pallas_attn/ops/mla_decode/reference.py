"""`mla_decode` in plain jnp: works anywhere, in float32, with gradients."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn._call.pools import table_tokens
from pallas_attn._split import page_loop
from pallas_attn._tile import masking, softmax
from pallas_attn._tile.latents import BYTES, LATENT_DIM
from pallas_attn.mods.operands import Mods, has_mask, over_arrays
from pallas_attn.mods.seen import of_sequences
from pallas_attn.ops.latent_cache.format import dequantized
from pallas_attn.ops.mla_decode.operands import Operands


class Others(NamedTuple):
    """[num_seqs, 1, rows, 1]: where each row's query is, and where what it sees ends."""

    query_at: jax.Array
    row_end: jax.Array
    mods: Mods | None


class Rule(page_loop.Rule):
    def floats(self, tile: jax.Array) -> jax.Array:
        # Rounded to bf16 as in the kernels, which changes nothing where scales are powers of two.
        return super().floats(dequantized(tile).astype(jnp.bfloat16) if tile.dtype == BYTES else tile)

    def logits(self, floats, of: page_loop.Sequences, keys, position, seen) -> jax.Array:
        logits = jnp.einsum("bhrd,bhkd->bhrk", floats.rows, keys, precision="highest")
        length = table_tokens(of.tables.shape[1], self.pool.page_size)
        of_mods = of.others.mods, floats.captured, of.others.query_at
        mods = over_arrays(*of_mods, self.by_row, position, length)
        logits = mods.masked(logits if mods.score is None else mods.score_of(logits))
        visible = seen[:, None, None, :] & masking.within(position, of.others.row_end)
        return masking.apply(logits, visible)


@jax.jit
def mla_decode_xla(operands: Operands) -> tuple[jax.Array, jax.Array]:
    """(out in query's dtype, lse float32). A schedule only distributes the work and is ignored here."""
    query, seq_lens, pool = operands.query, operands.seq_lens, operands.pool
    _, q_len, num_heads, _ = query.shape
    max_len = table_tokens(operands.block_tables.shape[1], pool.page_size)
    lengths = jnp.clip(seq_lens, 0, max_len)
    # Query token i is the sequence's token length - q_len + i, and with `causal` sees itself and what is before it.
    hidden = q_len - 1 - jnp.arange(q_len) if operands.causal else jnp.zeros(q_len, jnp.int32)
    hidden = jnp.repeat(hidden, num_heads // pool.num_kv_heads)
    token = jnp.repeat(jnp.arange(q_len), num_heads // pool.num_kv_heads)
    others = Others(
        query_at=(lengths[:, None] - q_len + token)[:, None, :, None],
        row_end=(lengths[:, None] - hidden)[:, None, :, None],
        mods=operands.mods,
    )
    left = None
    if operands.mods is not None and has_mask(operands.mods):
        left = of_sequences(operands.mods, seq_lens, q_len, max_len)
    scaled = query.astype(jnp.float32) * operands.scale
    out, lse, bad = page_loop.attend(
        Rule("mla_decode", pool, "NHD", LATENT_DIM, q_len),
        page_loop.Floats(page_loop.pack(scaled, pool.num_kv_heads), captured=operands.captured),
        page_loop.Pools(operands.latent_cache),
        page_loop.Sequences(operands.block_tables, lengths, jnp.zeros_like(lengths), others, left),
    )
    out, lse = (page_loop.unpack(x, q_len) for x in (out, lse.natural()))
    bad = (bad | (seq_lens != lengths))[:, None, None]
    return softmax.poison(out, bad[..., None]).astype(query.dtype), softmax.poison(lse, bad)
