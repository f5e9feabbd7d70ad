"""Score functions that are ALiBi: which they are, and that kernels which know slopes serve them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import lower_for_gpu
from support import as_if_cuda, unchecked

from pallas_attn import FlashAttentionCudaConfig, flash_attention, mods
from pallas_attn._tile.band import Band
from pallas_attn.mods.evaluate import evaluate
from pallas_attn.mods.program import BATCH, HEAD, KEY, QUERY, SCORE
from pallas_attn.mods.simplify import within
from pallas_attn.mods.slopes import slopes_of
from pallas_attn.mods.trace import trace

HEADS, LENGTH = 3, 50
SLOPES = jnp.array([0.5, 0.25, -0.125])
FULL, CAUSAL, AHEAD = Band(), Band(None, 0), Band(0, None)

ALIBI = {
    "of the past": (lambda s, b, h, q, k: s - SLOPES[h] * (q - k), FULL),
    "of keys less queries": (lambda s, b, h, q, k: SLOPES[h] * (k - q) + s, CAUSAL),
    "ready-made": (mods.alibi(SLOPES), CAUSAL),
    "in a window": (mods.alibi(SLOPES), Band(9, 0)),
    "of what is ahead": (mods.alibi(SLOPES), AHEAD),
    "by an offset": (lambda s, b, h, q, k: s - SLOPES[h] * abs(k - (q + 7)), Band(None, 0, 7)),
    "of the head's number": (lambda s, b, h, q, k: s + 2.0 ** -(h + 1.0) * (k - q), CAUSAL),
    "of all heads": (lambda s, b, h, q, k: s - 0.3 * (q - k).astype(jnp.float32), CAUSAL),
    "factors apart": (lambda s, b, h, q, k: s + -((q - k) * SLOPES[h] * 0.5), CAUSAL),
    "of two": (lambda s, b, h, q, k: (s - SLOPES[h] * (q - k)) - 0.1 * (q - k), CAUSAL),
    "none": (lambda s, b, h, q, k: s, FULL),
}
OTHERS = {
    "to both sides": (mods.alibi(SLOPES), FULL),
    "to both sides of a window": (mods.alibi(SLOPES), Band(9, 3)),
    "without the band's offset": (mods.alibi(SLOPES), Band(None, 0, 7)),
    "with an offset of its own": (lambda s, b, h, q, k: s - SLOPES[h] * (q - k + 1), CAUSAL),
    "by sequence": (lambda s, b, h, q, k: s - SLOPES[b] * (q - k), CAUSAL),
    "by query": (lambda s, b, h, q, k: s - SLOPES[q % 3] * (q - k), CAUSAL),
    "of half": (lambda s, b, h, q, k: s * 0.5 - SLOPES[h] * (q - k), CAUSAL),
    "of twice": (lambda s, b, h, q, k: s + s - SLOPES[h] * (q - k), CAUSAL),
    "less the score": (lambda s, b, h, q, k: SLOPES[h] * (q - k) - s, CAUSAL),
    "squares": (lambda s, b, h, q, k: s - SLOPES[h] * (q - k) * (q - k), CAUSAL),
    "of keys alone": (lambda s, b, h, q, k: s - SLOPES[h] * k, CAUSAL),
    "a bias": (lambda s, b, h, q, k: s - SLOPES[h] * (q - k) + SLOPES[h], CAUSAL),
    "in bf16": (lambda s, b, h, q, k: s - (SLOPES[h].astype(jnp.bfloat16) * (q - k)).astype(jnp.float32), CAUSAL),
    "a soft cap": (mods.soft_cap(3.0), CAUSAL),
    "a table": (mods.distance_table(jnp.ones((HEADS, 9)), 0), CAUSAL),
    "a number": (lambda s, b, h, q, k: jnp.float32(0), CAUSAL),
}  # fmt: skip


def found(mod, band):
    lengths = (BATCH, 2), (HEAD, HEADS), (QUERY, LENGTH), (KEY, LENGTH)
    traced = trace("f", "score_mod", mod)
    program = within(traced.program, lengths)
    return program, slopes_of(program, band), traced.arrays


@pytest.mark.parametrize("name", ALIBI)
def test_alibi_is_known(name):
    mod, band = ALIBI[name]
    program, slopes, arrays = found(mod, band)
    assert slopes is not None
    head, query, key = (jnp.arange(n) for n in (HEADS, LENGTH, LENGTH))
    (slope,) = evaluate(slopes, arrays, {HEAD: head})
    places = {BATCH: jnp.int32(0), HEAD: head[:, None, None], QUERY: query[:, None], KEY: key[None, :]}
    (want,) = evaluate(program, arrays, {SCORE: jnp.float32(0.25)} | places)
    got = 0.25 + jnp.broadcast_to(slope, HEADS)[:, None, None] * (key - query[:, None] - band.offset)
    seen = functools.reduce(np.logical_and, band.visible(query[:, None], key), True)
    want, got = (np.where(seen, np.broadcast_to(x, (HEADS, LENGTH, LENGTH)), 0) for x in (want, got))
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_not(name):
    assert found(*OTHERS[name])[1] is None


def _shapes(length: int, dim: int):
    return [jax.ShapeDtypeStruct((1, length, heads, dim), jnp.bfloat16) for heads in (6, 3, 3)]


def _gradients(*floats, config=None, **options):
    def loss(slopes, *floats):
        def bias(score, batch, head, q_idx, kv_idx):
            return score + slopes[head] * (kv_idx - q_idx)

        out = unchecked(flash_attention)(
            *floats, score_mod=bias, implementation="cuda", config=config, **options
        )
        return jnp.sum(out.astype(jnp.float32))

    return jax.grad(loss, (0, 1, 2, 3))(jnp.arange(6.0), *floats)


@pytest.mark.parametrize(
    ("options", "dim", "own"),
    [
        ({"causal": True, "config": FlashAttentionCudaConfig("cuda")}, 128, True),
        ({"config": FlashAttentionCudaConfig("tiled")}, 64, False),
        ({"causal": True, "softcap": 3.0}, 128, False),
        ({"causal": True}, 256, False),
    ],
)
def test_is_served_by_cuda(monkeypatch, options, dim, own):
    """Gradients of slopes are the tiled kernels'."""
    as_if_cuda(monkeypatch)
    text = lower_for_gpu(functools.partial(_gradients, **options), *_shapes(32768, dim)).as_text()
    assert "pallas_attn_attention_forward_sm90" in text
    assert ("pallas_attn_attention_backward_sm90" in text) == own
    assert ("pallas_attn_flash_attention_dkv" in text) != own
    assert "pallas_attn_flash_attention_dmod_queries" in text


@pytest.mark.parametrize(
    ("options", "dim", "reason"),
    [
        ({"softcap": 3.0}, 128, "takes no soft cap beside ALiBi"),
        ({}, 192, "takes ALiBi for heads of at most 128 elements, got 192"),
    ],
)
def test_gradients_that_it_has_not_are_refused(monkeypatch, options, dim, reason):
    as_if_cuda(monkeypatch)
    with pytest.raises(ValueError, match=reason):
        lower_for_gpu(
            functools.partial(_gradients, config=FlashAttentionCudaConfig("cuda"), **options),
            *_shapes(256, dim),
        )
