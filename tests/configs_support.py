"""Which config a call takes."""

import jax.numpy as jnp

from pallas_attn import paged_attention
from pallas_attn.ops.paged_attention import PagedAttentionConfig, api


def resolved(monkeypatch, num_seqs: int = 2, max_pages: int = 8) -> PagedAttentionConfig:
    """The config that a call of 2 query heads over 1 KV head takes."""
    taken = []
    monkeypatch.setattr(
        api.dispatch,
        "resolve",
        lambda *_: (
            "interpret",
            lambda query, *_, config, **__: (taken.append(config), (query, query[..., 0]))[1],
        ),
    )
    pool = jnp.zeros((4, 16, 1, 16), jnp.bfloat16)
    query = jnp.zeros((num_seqs, 2, 16), jnp.bfloat16)
    paged_attention(
        query, pool, pool, jnp.zeros((num_seqs, max_pages), jnp.int32), jnp.zeros(num_seqs, jnp.int32)
    )
    monkeypatch.undo()
    return taken[0]
