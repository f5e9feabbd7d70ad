"""Gradients of plain jnp over caches: nothing passes through what sees no key, were its cotangent NaN, nor through what
no query sees, were it NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn
from pallas_attn import LocalStride
from pallas_attn.ops.blocksparse_attention import builders

TABLES = jnp.array([[2, 0, 2147480000], [1, -1, 5], [4, 3, -7]], jnp.int32)
LENS, BOUNDS, TOKENS = jnp.array([11, 0, 16], jnp.int32), jnp.array([0, 3, 3, 7], jnp.int32), 7
PER_HEAD = jnp.linspace(0.1, 1, 4)
SLIDES = LocalStride(16, 1, 2, head_sliding_step=1)
DENSE = builders.dense_causal(32, block_size=16, q_block_size=16)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


def pool(*token: int, lens=LENS) -> jax.Array:
    """NaN in each slot that no sequence owns."""
    owned = np.zeros((6, 8), bool)
    for row, length in zip(TABLES.tolist(), lens.tolist(), strict=True):
        for at in range(length):
            owned[row[at // 8], at % 8] = True
    return jnp.where(jnp.asarray(owned).reshape(6, 8, *[1] * len(token)), normal(6, 8, *token), jnp.nan)


def tokens(*token: int) -> jax.Array:
    """Seven, and two of padding."""
    return normal(9, *token).at[TOKENS:].set(jnp.nan)


PAGES = pool(2, 16), pool(2, 16)
CONTEXT = pool(2, 16, lens=jnp.array([8, 0, 12])), pool(2, 16, lens=jnp.array([8, 0, 12]))
PLACES = TABLES, LENS, BOUNDS
LATENTS = pool(1, 576)
CHOSEN = jnp.array([[[16, 0, -1]], [[-1, -1, -1]], [[32, 25, -1]]], jnp.int32)


def paged(**options):
    return lambda q, k, v, **how: pallas_attn.paged_attention(q, k, v, TABLES, LENS, **options, **how)


def ragged(**options):
    return lambda q, k, v, **how: pallas_attn.ragged_paged_attention(q, k, v, *PLACES, **options, **how)


def prefix(**options):
    return lambda q, k, v, kc, vc, **how: pallas_attn.prefix_prefill(
        q, k, v, kc, vc, *PLACES, **options, **how
    )


def latent(**options):
    return lambda q, c, **how: pallas_attn.mla_decode(q, c, TABLES, LENS, **options, **how)


def sparse(q, c, **how):
    return pallas_attn.sparse_mla_decode(q, c, CHOSEN, **how)


def blocks(q, k, v, **how):
    places = dict(block_tables=TABLES, seq_lens=LENS, cu_q_lens=BOUNDS)
    return pallas_attn.blocksparse_attention(q, k, v, DENSE, **places, **how)


WINDOW = dict(sliding_window=4, softcap=2.0, alibi_slopes=PER_HEAD)
NEW = tokens(2, 16)
CALLS = {
    "paged": (paged(), (normal(3, 4, 16), *PAGES)),
    "paged, every option": (paged(**WINDOW, sinks=PER_HEAD), (normal(3, 3, 4, 16), *PAGES)),
    "paged, strides": (paged(block_sparse=SLIDES), (normal(3, 4, 16), *PAGES)),
    "ragged": (ragged(), (tokens(4, 16), *PAGES)),
    "ragged, every option": (ragged(**WINDOW, sinks=PER_HEAD), (tokens(4, 16), *PAGES)),
    "ragged, not causal": (ragged(causal=False), (tokens(4, 16), *PAGES)),
    "prefix": (prefix(), (tokens(4, 16), NEW, NEW, *CONTEXT)),
    "prefix, every option": (prefix(**WINDOW, sinks=PER_HEAD), (tokens(4, 16), NEW, NEW, *CONTEXT)),
    "latents": (latent(), (normal(3, 2, 4, 576), LATENTS)),
    "latents, causal": (latent(causal=True), (normal(3, 2, 4, 576), LATENTS)),
    "chosen latents": (sparse, (normal(3, 1, 4, 576), LATENTS)),
    "blocks": (blocks, (tokens(4, 16), *PAGES)),
}


def assert_nothing_passes(call, arguments) -> None:
    @jax.jit
    def both(*arguments):
        (out, lse), pull = jax.vjp(call, *arguments)
        blind = (lse == -jnp.inf) | (lse == jnp.inf)
        by_token = jnp.moveaxis(blind, 1, 2) if blind.shape != out.shape[:-1] else blind
        of_out = jnp.where(by_token[..., None], jnp.nan, jnp.ones_like(out))
        return by_token, pull((of_out, jnp.where(blind, jnp.nan, 1.0)))

    blind, gradients = both(*arguments)
    assert 0 < int(blind.sum()) < blind.size
    for gradient, given in zip(map(np.asarray, gradients), map(np.asarray, arguments), strict=True):
        assert np.isfinite(gradient).all()
        assert (gradient[np.isnan(given)] == 0).all()
        assert (gradient[~np.isnan(given)] != 0).any()
    np.testing.assert_array_equal(np.asarray(gradients[0])[np.asarray(blind)], 0)


@pytest.mark.parametrize("case", CALLS)
def test_nothing_passes_through_the_unseen(case):
    call, arguments = CALLS[case]
    assert_nothing_passes(lambda *given: call(*given, return_lse=True, implementation="xla"), arguments)


REFUSED = {
    "paged": "paged_attention",
    "ragged": "ragged_paged_attention",
    "prefix": "prefix_prefill",
    "latents": "mla_decode",
    "chosen latents": "sparse_mla_decode",
    "blocks": "blocksparse_attention with keys in pages",
}


@pytest.mark.parametrize("case", REFUSED)
def test_derivatives_that_there_are_not_are_refused_by_name(case):
    """Of kernels all, of plain jnp with a rule of its own those in forward mode."""
    call, arguments = CALLS[case]
    with pytest.raises(
        NotImplementedError, match=f"^{REFUSED[case]}: the kernel has no gradients; .* 'xla' has"
    ):
        jax.vjp(lambda *given: call(*given, implementation="interpret"), *arguments)
    if case not in ("chosen latents", "blocks"):
        with pytest.raises(
            NotImplementedError, match=f"^{REFUSED[case]}: has derivatives in reverse mode alone"
        ):
            jax.jvp(lambda *given: call(*given, implementation="xla"), arguments, arguments)


@pytest.mark.parametrize("clean", ["slots", "cotangents"])
@pytest.mark.control
def test_plain_attention_is_caught(clean):
    """Negative control: 0 * NaN is NaN, of a slot that nobody sees and of what comes back to a row without keys."""
    query, keys, values = (
        normal(3, 4, 16),
        *(pages[TABLES.clip(0, 5)].reshape(3, 24, 2, 16) for pages in PAGES),
    )

    def attend(query, keys, values):
        if clean == "slots":
            keys, values = (jnp.where(jnp.isnan(x), 0, x) for x in (keys, values))
        keys, values = (jnp.repeat(x, 2, axis=2) for x in (keys, values))
        seen = (jnp.arange(24) < LENS[:, None])[:, None]
        logits = jnp.where(seen, jnp.einsum("shd,skhd->shk", query, keys), -jnp.inf)
        top = jnp.where(jnp.isneginf(logits.max(-1)), 0, logits.max(-1))[..., None]
        total = jnp.exp(logits - top).sum(-1)
        weights = jnp.exp(logits - top) / jnp.maximum(total, 1e-30)[..., None]
        out = jnp.einsum("shk,skhd->shd", weights, values)
        if clean == "cotangents":
            out = jnp.where(total[..., None] > 0, out, 0)
        return out, jnp.where(total > 0, jnp.log(total) + top[..., 0], -jnp.inf)

    with pytest.raises(AssertionError):
        assert_nothing_passes(attend, (query, keys, values))


def test_nothing_passes_through_parts_without_keys():
    out, lse = normal(4, 2, 8), normal(4, 2)
    none = lse.at[1:3].set(-jnp.inf)  # of these the third has none in either part
    arguments = (out, none, out.at[2].set(jnp.nan), lse.at[2].set(jnp.inf))
    for sinks in (None, jnp.ones(2)):
        _, pull = jax.vjp(
            lambda *parts, sinks=sinks: pallas_attn.merge_states(*parts, sinks=sinks), *arguments
        )
        gradients = pull((jnp.ones_like(out).at[2].set(jnp.nan), jnp.ones_like(lse).at[2].set(jnp.nan)))
        assert all(np.isfinite(gradient).all() for gradient in gradients)
        assert not any(np.asarray(gradient[2]).any() for gradient in gradients)
        assert not np.asarray(gradients[1][1]).any()
        assert np.asarray(gradients[3][1]).all()
