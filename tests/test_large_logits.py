"""Logits so large that float32 has no fractions of them: each op's softmax is jax.nn's, of which the maximum's own
weight is exactly 1. Several keys have the largest logit, more of them in one split than in the other."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import ON_GPU

import pallas_attn
from pallas_attn import PagedAttentionConfig, RaggedAttentionConfig, RaggedTiles, SparseMLAConfig
from pallas_attn.ops.blocksparse_attention import builders
from pallas_attn.ops.mla_decode.config import MLADecodeConfig

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["xla", "interpret", *ON_GPU])
# Of both, the products' squares are beyond what 2**24 units in the last place can tell apart.
LARGE = pytest.mark.parametrize(("dtype", "size"), [("float16", 3e4), ("bfloat16", 1e8)])
MASKS = [-1e9, -1e10, -1e12, -1e20, float(np.finfo(np.float32).min)]
TOKENS, HEADS, DIM = 40, 2, 16
BEST = np.array([3, 20, 21, 25, 30])
CUT = dict(num_splits=3, min_split_tokens=16)


def plain(query, key, value, bias=0.0, scale: float | None = None):
    """(out, lse) as jax.nn has them, of [tokens, heads, dim] in float32."""
    query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    logits = jnp.einsum("qhd,khd->hqk", query, key, precision="highest") * (scale or DIM**-0.5) + bias
    out = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(logits), value, precision="highest")
    return out, jax.nn.logsumexp(logits, axis=-1).T


def aligned(dtype: str, size: float, dim: int = DIM, heads: int = HEADS, queries: int = 1):
    """Queries, and keys and values of which `BEST` have the queries' signs."""
    rng = np.random.default_rng(0)
    signs = rng.choice([-1.0, 1.0], dim)
    keys = rng.choice([-1.0, 1.0], (TOKENS, heads, dim))
    keys[:, :, 0] = -signs[0]
    keys[BEST] = signs
    query = np.broadcast_to(signs, (queries, heads, dim))
    values = rng.standard_normal((TOKENS, heads, dim))
    return jnp.asarray(query * size, dtype), jnp.asarray(keys * size, dtype), jnp.asarray(values, dtype)


def check(found, expected, dtype: str = "float32") -> None:
    limit = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1e-2}[dtype]
    for got, wanted in zip(found, expected, strict=True):
        got, wanted = np.float32(got), np.float32(wanted)
        assert np.abs(got - wanted).max() <= limit * np.abs(wanted).max(), (got, wanted)


@pytest.mark.parametrize("mask", MASKS)
@IMPLEMENTATIONS
def test_additive_masks(implementation, mask):
    """On some keys of a row and on all of them, with gradients, in one call."""
    rng = np.random.default_rng(0)
    query, key, value, d_out = (
        jnp.asarray(rng.standard_normal((n, HEADS, DIM)), jnp.float32) for n in (24, TOKENS, TOKENS, 24)
    )
    bias = jnp.zeros((24, TOKENS)).at[5].set(mask).at[7, :20].set(mask)

    def ours(query, key, value, bias):
        flash = functools.partial(pallas_attn.flash_attention, return_lse=True, implementation=implementation)
        out, lse = flash(query[None], key[None], value[None], bias=bias[None, None])
        return out[0], lse[0]

    results = []
    for function in (ours, plain):
        out, pull = jax.vjp(function, query, key, value, bias)
        results.append((*out, *pull((d_out, jnp.ones_like(out[1])))))
    assert all(np.isfinite(x).all() for x in results[1])
    check(*results)


@LARGE
@IMPLEMENTATIONS
def test_flash_attention(implementation, dtype, size):
    arrays = aligned(dtype, size, queries=24)

    def ours(query, key, value):
        flash = functools.partial(pallas_attn.flash_attention, return_lse=True, implementation=implementation)
        out, lse = flash(query[None], key[None], value[None])
        return out[0].astype(jnp.float32), lse[0]

    results = []
    for function in (ours, plain):
        out, pull = jax.vjp(function, *arrays)
        _, d_key, d_value = pull((out[0] + 1.0, 0.0 * out[1]))  # of queries they cancel out
        results.append((*out, d_value, *([d_key] if dtype == "bfloat16" else [])))  # fp16 overflows
    check(*results, dtype)


@LARGE
@IMPLEMENTATIONS
@pytest.mark.parametrize("op", ["paged_attention", "ragged_paged_attention", "prefix_prefill"])
def test_caches_in_splits(op, implementation, dtype, size):
    query, key, value = aligned(dtype, size)
    pools = (jnp.pad(x, ((0, 24), (0, 0), (0, 0))).reshape(4, 16, HEADS, DIM) for x in (key, value))
    tables, lens = jnp.arange(4, dtype=jnp.int32)[None], jnp.array([TOKENS], jnp.int32)
    config: Any = PagedAttentionConfig(16, 16, **CUT)
    if op != "paged_attention":
        config = RaggedAttentionConfig(RaggedTiles(16, 16, **CUT))
    bounds = () if op == "paged_attention" else (jnp.array([0, 1], jnp.int32),)
    new = (key[-1:], value[-1:]) if op == "prefix_prefill" else ()
    call = functools.partial(getattr(pallas_attn, op), return_lse=True, implementation=implementation)
    found = call(
        query, *new, *pools, tables, lens, *bounds, config=None if implementation == "xla" else config
    )
    check(found, plain(query, key, value), dtype)


@IMPLEMENTATIONS
def test_scales_of_pages(implementation):
    """Logits are products with a scale then."""
    query, key, value = aligned("float32", 100.0)
    rng = np.random.default_rng(0)
    scales = jnp.asarray(rng.uniform(0.9e10, 1.1e10, (4, HEADS)), jnp.float32)
    pools = [jnp.pad(x, ((0, 24), (0, 0), (0, 0))).reshape(4, 16, HEADS, DIM) for x in (key, value)]
    stored = [jnp.clip(jnp.round(x), -127, 127).astype(jnp.int8) for x in pools]
    by_token = jnp.repeat(scales, 16, axis=0)[:TOKENS, :, None]
    keys, values = (x.astype(jnp.float32).reshape(64, HEADS, DIM)[:TOKENS] for x in stored)
    found = pallas_attn.paged_attention(
        *(query, *stored, jnp.arange(4, dtype=jnp.int32)[None], jnp.array([TOKENS], jnp.int32)),
        k_scale=scales,
        v_scale=jnp.ones((4, HEADS)),
        return_lse=True,
        implementation=implementation,
        config=None if implementation == "xla" else PagedAttentionConfig(16, 16, **CUT),
    )
    check(found, plain(query, keys * by_token, values))


@LARGE
@IMPLEMENTATIONS
@pytest.mark.parametrize("queries", [1, 24], ids=["decode", "prefill"])
def test_blocksparse_attention(queries, implementation, dtype, size):
    query, key, value = aligned(dtype, size, dim=32, queries=queries)
    layout = builders.dense_causal(TOKENS, block_size=16, q_block_size=16)
    key_lens, query_lens = jnp.array([0, TOKENS], jnp.int32), jnp.array([0, queries], jnp.int32)

    def ours(query, key, value):
        out, lse = pallas_attn.blocksparse_attention(
            *(query, key, value, layout),
            cu_k_lens=key_lens,
            cu_q_lens=query_lens,
            scale=DIM**-0.5,
            return_lse=True,
            implementation=implementation,
        )
        return out.astype(jnp.float32), lse

    position = TOKENS - queries + np.arange(queries)
    bias = jnp.where(np.arange(TOKENS) <= position[:, None], 0.0, -jnp.inf)
    results = []
    for function in (ours, functools.partial(plain, bias=bias)):
        out, pull = jax.vjp(function, query, key, value)
        results.append((*out, pull((out[0] + 1.0, 0.0 * out[1]))[2]))
    check(*results, dtype)


@LARGE
@pytest.mark.parametrize(
    "implementation", ["xla", "interpret", *ON_GPU, pytest.param("cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("op", ["mla_decode", "sparse_mla_decode"])
def test_latents(op, implementation, dtype, size):
    query, key, _ = aligned(dtype, size / 100, dim=576, heads=1)
    query = jnp.broadcast_to(query, (1, 16, 576))
    pool = jnp.pad(key, ((0, 24), (0, 0), (0, 0))).reshape(1, 64, 1, 576)
    config: Any = None
    if op == "mla_decode":
        given = jnp.zeros((1, 1), jnp.int32), jnp.array([TOKENS], jnp.int32)
        config = MLADecodeConfig(16, 16, num_splits=3)
    else:
        given = (jnp.arange(TOKENS, dtype=jnp.int32)[None, None],)
        config = SparseMLAConfig(16, 16, num_splits=3)
    config = None if implementation in ("xla", "cuda") else config
    out, lse = getattr(pallas_attn, op)(
        *(query[None], pool, *given), scale=0.1, return_lse=True, implementation=implementation, config=config
    )
    keys = jnp.broadcast_to(key, (TOKENS, 16, 576))
    check((out[0, 0], lse[0, 0]), (x[0] for x in plain(query, keys, keys[..., :512], scale=0.1)), dtype)


@pytest.mark.parametrize(("dtype", "size"), [("float16", 3e4), ("bfloat16", 1e8)])
@pytest.mark.control
def test_an_exponent_whose_maximum_is_rounded_apart_is_caught(dtype, size):
    """Negative control: exp2(factor * x - rounded(factor * maximum)), of which a compiler fuses the first half."""
    query, key, value = aligned(dtype, size)
    expected = plain(query, key, value)
    logits = np.einsum("qhd,khd->hqk", *(np.asarray(x, np.float32) for x in (query, key)))
    factor = np.float32(DIM**-0.5 * np.log2(np.e))
    fused = np.float64(factor) * logits - np.float64(factor * logits.max(-1, keepdims=True))
    with np.errstate(over="ignore", invalid="ignore"):
        weights = np.exp2(fused.astype(np.float32))
        out = np.einsum("hqk,khd->qhd", weights, np.asarray(value, np.float32)) / weights.sum(-1).T[..., None]
        lse = (logits.max(-1) * DIM**-0.5 + np.log(weights.sum(-1))).T
        with pytest.raises(AssertionError):
            check((out, lse), expected, dtype)
