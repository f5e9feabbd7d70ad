"""The projected form: keys and values of every head, made from the latents.

Those of the new tokens are computed at once and attended to causally. Those of the context are computed in a workspace
of fixed size, which sequences share: their contexts lie end to end, each starting at a new page, and every turn takes
the next pages. So the work is that of the contexts together, not of the longest times their number.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn._call import symbolic
from pallas_attn._call.op import Op
from pallas_attn._call.sizes import ceil_div
from pallas_attn._tile.latents import BYTES, LATENT_DIM
from pallas_attn._tile.masking import Rules
from pallas_attn.ops.latent_cache.format import dequantized
from pallas_attn.ops.mla_prefill.batch import Batch
from pallas_attn.ops.ragged_attention.operands import Operands
from pallas_attn.ops.ragged_attention.states import merged

PAGE = 64  # tokens of a page of the workspace
NO_PAGE = 16  # page size where there is no context: any that kernels serve well
WORKSPACE_TOKENS = 4096


def attend(op: Op, batch: Batch, mine: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(out, lse) of the sequences `mine` [max_seqs]; 0 and -inf for others, whose contexts are not read."""
    given = batch.operands
    query, lens, latent_cache = given.query, given.seq_lens, given.latent_cache

    def run(**parts: Any) -> tuple[jax.Array, ...]:
        operands = Operands(
            query=query,
            cu_q_lens=given.cu_q_lens,
            num_seqs=given.num_seqs,
            layout="NHD",
            scale=given.scale,
            rules=Rules(),
            out_dtype=query.dtype,
            **parts,
        )
        return op.serve(operands, implementation=given.implementation)

    def made(seq: jax.Array, position: jax.Array, held: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values [..., num_heads, dim] of tokens; NaN for invalid pages, 0 where not `held`."""
        page, offset, is_place = batch.places(seq, position)
        stored = latent_cache[page, offset, 0]
        stored = dequantized(stored).astype(query.dtype) if latent_cache.dtype == BYTES else stored
        token = jnp.where(held[..., None], jnp.where(is_place[..., None], stored, jnp.nan), 0)
        latent, rope = token[..., :LATENT_DIM], token[..., LATENT_DIM:]
        keys, values = (
            jnp.einsum("...c,hnc->...hn", latent, up, precision="highest").astype(query.dtype)
            for up in (given.key_up, given.value_up)
        )
        rope = jnp.broadcast_to(rope[..., None, :], (*keys.shape[:-1], rope.shape[-1]))
        return jnp.concatenate([keys, rope], axis=-1), values

    is_mine = batch.by_token(mine)[:, None]
    keys, values = made(batch.seq_of_token, batch.position, is_mine[:, 0])
    no_keys, no_values = (jnp.zeros((1, NO_PAGE, *x.shape[1:]), x.dtype) for x in (keys, values))
    own, own_lse = run(
        key=keys,
        value=values,
        key_cache=no_keys,
        value_cache=no_values,
        block_tables=given.block_tables[:, :1],
        seq_lens=batch.q_lens,
    )
    own_lse = jnp.where(is_mine, own_lse, -jnp.inf)

    tokens = batch.capacity * mine.shape[0]
    tokens = WORKSPACE_TOKENS if symbolic.is_open(tokens) else min(WORKSPACE_TOKENS, tokens)
    num_pages = max(1, tokens // PAGE)
    contexts = jnp.where(mine, jnp.clip(lens - batch.q_lens, 0, batch.capacity), 0)
    ends = jnp.cumsum(ceil_div(contexts, PAGE))
    begins = ends - ceil_div(contexts, PAGE)

    def turn(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        first = i * num_pages
        page = first + jnp.arange(num_pages)
        seq = jnp.minimum(symbolic.searchsorted(ends, page, side="right"), ends.shape[0] - 1)[:, None]
        position = (page[:, None] - begins[seq]) * PAGE + jnp.arange(PAGE)
        keys, values = made(seq, position, (position >= 0) & (position < contexts[seq]))
        # The part of each sequence's context that is in the workspace, on contiguous pages.
        from_page, to_page = (jnp.clip(x, first, first + num_pages) for x in (begins, ends))
        held = jnp.clip(contexts - (from_page - begins) * PAGE, 0, (to_page - from_page) * PAGE)
        tables = (from_page - first)[:, None] + jnp.arange(num_pages)
        part = run(
            key_cache=keys,
            value_cache=values,
            block_tables=tables.astype(jnp.int32),
            seq_lens=held.astype(jnp.int32),
            causal=False,
        )
        return merged((state[0], part[0]), (state[1], part[1]))

    start = own.astype(jnp.float32), own_lse
    out, lse = jax.lax.fori_loop(0, ceil_div(ends[-1], num_pages), turn, start)
    # An invalid length; 0 is valid, and empty.
    bad = batch.by_token(mine & ((lens < batch.q_lens) | (lens > batch.capacity)))[:, None]
    out = jnp.where(is_mine[..., None], jnp.where(bad[..., None], jnp.nan, out), 0)
    return out.astype(query.dtype), jnp.where(bad, jnp.nan, lse)
