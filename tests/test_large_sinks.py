"""A sink beside which no key has weight, in every op that takes sinks: finite, infinite in base 2, and infinite."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import ON_GPU

import pallas_attn
from pallas_attn import PagedAttentionConfig, RaggedAttentionConfig, RaggedTiles

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["xla", "interpret", *ON_GPU])
# One of a usual size beside them: its head must not change.
SINKS = np.array([1e5, 1e10, 2e38, 3e38, np.inf, 1.5], np.float32)
LARGEST = 2.3e38  # what lse says of those that are larger
TOKENS, HEADS, DIM = 60, len(SINKS), 16
CUT = dict(num_splits=3, min_split_tokens=16)
CONFIGS = {
    "paged_attention": PagedAttentionConfig(16, 16, **CUT),
    "ragged_paged_attention": RaggedAttentionConfig(RaggedTiles(16, 16, **CUT)),
}


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def attend(op: str, implementation: str, query: jax.Array, sinks: np.ndarray | jax.Array):
    """(out [heads, dim], lse [heads]) of one query token, whose keys are in several splits where they can be."""
    keys, values = normal(1, 4, 16, 1, DIM), normal(2, 4, 16, 1, DIM)
    run = functools.partial(
        getattr(pallas_attn, op), sinks=jnp.asarray(sinks), return_lse=True, implementation=implementation
    )
    if op == "flash_attention":
        dense = (x.reshape(1, 64, 1, DIM)[:, :TOKENS] for x in (keys, values))
        out, lse = run(query[None], *dense)
        return out[0, 0], lse[0, 0]
    config = None if implementation == "xla" else CONFIGS.get(op)
    tables, lens = jnp.arange(4, dtype=jnp.int32)[None], jnp.array([TOKENS], jnp.int32)
    bounds = () if op == "paged_attention" else (jnp.array([0, 1], jnp.int32),)
    new = (normal(3, 1, 1, DIM), normal(4, 1, 1, DIM)) if op == "prefix_prefill" else ()
    out, lse = run(query, *new, keys, values, tables, lens, *bounds, config=config)
    return out[0], lse[0]


def check(out, lse, usual) -> None:
    """`usual` is (out, lse) with the last sink for every head."""
    np.testing.assert_array_equal(out[:-1], 0)
    np.testing.assert_allclose(lse[:-1], np.minimum(SINKS[:-1], LARGEST), rtol=1e-6)
    assert np.abs(usual[0][-1]).max() > 0.01
    for found, expected in zip((out, lse), usual, strict=True):
        np.testing.assert_allclose(found[-1], expected[-1], rtol=1e-5)


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    "op", ["paged_attention", "ragged_paged_attention", "prefix_prefill", "flash_attention"]
)
def test_no_key_has_weight(op, implementation):
    call = jax.jit(functools.partial(attend, op, implementation))
    query = normal(0, 1, HEADS, DIM)
    check(*call(query, SINKS), call(query, np.full(HEADS, SINKS[-1])))


BESIDE_NOTHING = np.array([-3.0, 2.0, -1e5, 1e5, -0.5, 0.0], np.float32)


@IMPLEMENTATIONS
@pytest.mark.parametrize("op", ["paged_attention", "ragged_paged_attention", "flash_attention"])
def test_beside_no_key_a_sink_is_all_of_lse(op, implementation):
    """Of either sign. Two of three queries stand before the first key."""
    query, (key, value) = normal(0, 3, HEADS, DIM), (normal(seed, 1, 16, 1, DIM) for seed in (1, 2))
    run = functools.partial(
        getattr(pallas_attn, op),
        sinks=jnp.asarray(BESIDE_NOTHING),
        return_lse=True,
        implementation=implementation,
    )
    tables, lens = jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)
    if op == "flash_attention":
        out, lse = run(query[None], key[:, :1], value[:, :1], causal=True, q_offset=-2)
    elif op == "paged_attention":
        out, lse = run(query[None], key, value, tables, lens)
    else:
        out, lse = run(query, key, value, tables, lens, jnp.array([0, 3], jnp.int32))
    out, lse = (np.asarray(x).reshape(3, HEADS, -1) for x in (out, lse))
    np.testing.assert_array_equal(out[:2], 0)
    np.testing.assert_allclose(lse[:2, :, 0], np.stack([BESIDE_NOTHING] * 2), rtol=1e-6)
    logit = np.einsum("hd,d->h", query[2], key[0, 0, 0]) * DIM**-0.5
    np.testing.assert_allclose(lse[2, :, 0], np.logaddexp(logit, BESIDE_NOTHING), rtol=1e-5)


@IMPLEMENTATIONS
def test_flash_attention_has_gradients(implementation):
    """That of such a sink is of its lse alone; 1e10 and more lose in float32 what tells lse and the sink apart."""

    def loss(query, sinks):
        out, lse = attend("flash_attention", implementation, query, sinks)
        return jnp.sum(out) + jnp.sum(jnp.where(jnp.arange(HEADS) == HEADS - 1, lse, 0.0))

    of_query, of_sinks = jax.jit(jax.grad(loss, (0, 1)))(normal(0, 1, HEADS, DIM), jnp.asarray(SINKS))
    np.testing.assert_array_equal(of_query[:, :-1], 0)
    np.testing.assert_array_equal(of_sinks[:-1], 0)
    assert np.isfinite(of_query).all()
    assert abs(of_sinks[-1]) > 1e-3


def test_paged_attention_by_xla_has_gradients():
    def loss(query, sinks):
        out, lse = attend("paged_attention", "xla", query, sinks)
        return jnp.sum(out) + jnp.sum(lse[-1])

    of_query, of_sinks = jax.grad(loss, (0, 1))(normal(0, 1, HEADS, DIM), jnp.asarray(SINKS))
    np.testing.assert_array_equal(of_query[:, :-1], 0)
    np.testing.assert_array_equal(of_sinks[:-1], 0)
    assert np.isfinite(of_query).all()
    assert abs(of_sinks[-1]) > 1e-3


def test_merged_states():
    states = [x for seed in (1, 2) for x in (normal(seed, HEADS, DIM), normal(seed + 2, HEADS))]
    usual = pallas_attn.merge_states(*states, sinks=jnp.full(HEADS, SINKS[-1]))
    check(*pallas_attn.merge_states(*states, sinks=jnp.asarray(SINKS)), usual)


@IMPLEMENTATIONS
def test_sparse_mla(implementation):
    """Whose lse the sinks are no part of."""
    pool, query = normal(0, 1, 16, 1, 576).astype(jnp.bfloat16), normal(1, 1, 1, HEADS, 576) / 30
    call = functools.partial(
        *(pallas_attn.sparse_mla_decode, query.astype(jnp.bfloat16), pool, jnp.array([[[3, 5]]], jnp.int32)),
        implementation=implementation,
    )
    out, usual = (np.float32(call(sinks=x))[0, 0] for x in (jnp.asarray(SINKS), jnp.full(HEADS, SINKS[-1])))
    np.testing.assert_array_equal(out[:-1], 0)
    np.testing.assert_array_equal(out[-1], usual[-1])
    assert np.abs(usual).max() > 0.01


@IMPLEMENTATIONS
def test_nan_stays_nan(implementation):
    sinks = np.full(HEADS, np.nan, np.float32)
    for op in ("paged_attention", "ragged_paged_attention", "flash_attention"):
        out, _ = attend(op, implementation, normal(0, 1, HEADS, DIM), sinks)
        assert np.isnan(out).all(), op
