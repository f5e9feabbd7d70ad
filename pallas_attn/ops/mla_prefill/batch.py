"""Ragged sequences as arrays, for the plain jnp around a kernel."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn._call import symbolic
from pallas_attn._call.pools import table_tokens
from pallas_attn._tile.masking import usable_pages
from pallas_attn.ops.mla_prefill.operands import Operands
from pallas_attn.ops.ragged_attention.blocks import Ragged


class Batch(NamedTuple):
    operands: Operands
    q_lens: jax.Array
    """[max_seqs]; 0 after the last sequence."""
    holds_some: jax.Array
    """[max_seqs]: sequences with query tokens and a length other than 0."""
    seq_of_token: jax.Array
    """[total_tokens], clamped: padding has the last sequence's."""
    is_real: jax.Array
    """[total_tokens]: not padding."""
    position: jax.Array
    """[total_tokens] in the sequence; negative where there are more query tokens than the length says."""

    @classmethod
    def of(cls, operands: Operands) -> "Batch":
        num_tokens, max_seqs = operands.query.shape[0], operands.block_tables.shape[0]
        ragged = Ragged(num_tokens, max_seqs, 1)
        num_seqs = ragged.num_of(operands.cu_q_lens, operands.num_seqs)
        index = jnp.arange(max_seqs + 1)
        bounds = ragged.bound(index, operands.cu_q_lens, num_seqs)
        counts = jnp.arange(max_seqs) < num_seqs
        q_lens = jnp.where(counts, jnp.maximum(bounds[1:] - bounds[:-1], 0), 0)
        token = jnp.arange(num_tokens)
        seq = symbolic.searchsorted(jnp.where(counts, bounds[1:], num_tokens), token, side="right")
        is_real = seq < num_seqs
        seq = jnp.minimum(seq, max_seqs - 1)
        position = operands.seq_lens[seq] - bounds[seq + 1] + token
        holds_some = (q_lens > 0) & (operands.seq_lens != 0)
        return cls(operands, q_lens, holds_some, seq, is_real, position)

    @property
    def num_tokens(self) -> int:
        return self.operands.query.shape[0]

    @property
    def page_size(self) -> int:
        return self.operands.latent_cache.shape[1]

    @property
    def capacity(self) -> int:
        """Tokens that a row of the block table can name."""
        return table_tokens(self.operands.block_tables.shape[1], self.page_size)

    def by_token(self, by_seq: jax.Array) -> jax.Array:
        """[max_seqs] -> [total_tokens]; False for padding."""
        return by_seq[self.seq_of_token] & self.is_real

    def places(self, seq: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(page, offset, whether the slot exists) of sequences' tokens; both arrays broadcast."""
        column = position // self.page_size
        inside = (position >= 0) & (position < self.capacity)
        page = self.operands.block_tables[seq, jnp.where(inside, column, 0)]
        is_place = inside & usable_pages(page, self.operands.latent_cache.shape[0])
        return jnp.where(is_place, page, 0), position % self.page_size, is_place
