"""Bounds of sequences that descend: refused where their values are known, and never plausible where they are not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import unchecked

import pallas_attn
from pallas_attn.ops.blocksparse_attention import builders

BOUNDS = np.array([0, 9, 5, 16], np.int32)
TOKENS = 16


def rows(seed: int, heads: int = 2) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (TOKENS, heads, 16))


def flash(bounds):
    query, key, value = (rows(seed)[None] for seed in range(3))
    call = unchecked(pallas_attn.flash_attention)
    return call(query, key, value, cu_q_lens=bounds, return_lse=True, implementation="xla")


def ragged(bounds):
    pool = jnp.ones((4, 8, 2, 16))
    tables, lens = jnp.zeros((3, 2), jnp.int32), jnp.full(3, 9, jnp.int32)
    call = unchecked(pallas_attn.ragged_paged_attention)
    return call(rows(0), pool, pool, tables, lens, bounds, implementation="xla")


def blocksparse(bounds):
    pool = rows(1)
    dense = builders.dense_causal(16, block_size=16, q_block_size=16)
    call = unchecked(pallas_attn.blocksparse_attention)
    ends = jnp.array([0, 9, 9, 16], jnp.int32)
    return call(rows(0), pool, pool, dense, cu_q_lens=bounds, cu_k_lens=ends, implementation="xla")


@pytest.mark.parametrize("call", [flash, ragged, blocksparse])
def test_known_ones_are_refused(call):
    with pytest.raises(
        ValueError, match=r"argument 'cu_q_lens': expected bounds that do not descend, got 5 behind 9"
    ):
        call(BOUNDS)


def test_traced_ones_leave_documents_without_tokens():
    for bounds in (jnp.asarray(BOUNDS), jnp.array([0, 9, 9, 16], jnp.int32)):
        out, lse = jax.jit(flash)(bounds)
        descends = bool((bounds[1:] < bounds[:-1]).any())
        assert (not np.asarray(out).any()) == descends
        assert np.isneginf(lse).all() == descends
