"""Which config a call takes."""

import jax.numpy as jnp

from pallas_attn import paged_attention
from pallas_attn._call import dispatch
from pallas_attn.ops.paged_attention import PagedAttentionConfig
from pallas_attn.ops.paged_attention.api import OP


def resolved(monkeypatch, num_seqs: int = 2, max_pages: int = 8) -> PagedAttentionConfig:
    """The config that a call of 2 query heads over 1 KV head takes."""
    taken = []

    def attend(operands, *, config):
        taken.append(config)
        return operands.query, operands.query[..., 0]

    monkeypatch.setitem(OP.implementations, "xla", dispatch.Implementation(attend))
    pool = jnp.zeros((4, 16, 1, 16), jnp.bfloat16)
    query = jnp.zeros((num_seqs, 2, 16), jnp.bfloat16)
    paged_attention(
        query, pool, pool, jnp.zeros((num_seqs, max_pages), jnp.int32), jnp.zeros(num_seqs, jnp.int32)
    )
    monkeypatch.undo()
    return taken[0]
