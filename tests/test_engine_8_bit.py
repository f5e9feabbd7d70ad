"""An engine over an 8-bit cache: what it has stored, and answers, is as if nothing had been served before."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_support import run
from models_support import TINY, tiny_llama

from pallas_attn.models import Engine

pytestmark = [pytest.mark.once, pytest.mark.slow]  # what it is made of is tested by itself, on both jax

SIZES = dict(max_len=64, num_rows=4, page_size=4, step_tokens=16)
LARGER = 48
"""Tokens from here on have keys and values 50 times as large."""


def test_an_8_bit_cache_keeps_its_scales_while_pages_are_remembered():
    """Scales belong to what is stored: later prompts, larger or not, must not change what cached pages mean."""
    engine = Engine(tiny_llama(), **SIZES, cache_dtype=jnp.int8)
    prompt = np.random.default_rng(0).integers(0, TINY.vocab_size, 30).tolist()
    first = engine.submit(prompt, max_new_tokens=6)
    run(engine)
    run_other = engine.submit([7] * 20, max_new_tokens=3)
    run(engine)
    again = engine.submit(prompt, max_new_tokens=6)
    run(engine)
    assert run_other.done
    assert again.reused == 28
    assert again.answer == first.answer


@pytest.fixture(scope="module")
def uneven():
    """One layer: what a token's keys and values are depends on its place alone, not on what others have stored."""
    model = tiny_llama(config=dataclasses.replace(TINY, num_layers=1))
    half = TINY.hidden_size // 2
    small, large = jnp.split(model.embedding[...], [LARGER])
    model.embedding[...] = jnp.concatenate([small.at[:, half:].set(0), large.at[:, :half].set(0)])
    kernel, keys = model.layers.attention.qkv_proj.kernel, TINY.num_heads * TINY.head_dim
    kernel[...] = kernel[...].at[:, :half, keys:].divide(50)
    return model


@pytest.fixture(scope="module")
def exact(uneven):
    """Keys and values [tokens, 2 * heads, dim] of a request's tokens, in float32."""
    size = TINY.context_length
    tables, positions = jnp.zeros((1, 1), jnp.int32), jnp.arange(size, dtype=jnp.int32)[None]
    cache = uneven.create_cache(num_pages=1, page_size=size, block_tables=tables)
    fill = jax.jit(lambda tokens: uneven(tokens, positions, cache)[1])

    def of(request) -> np.ndarray:
        tokens = np.resize(np.array(request.tokens, np.int32), (1, size))
        filled = fill(tokens)
        return np.concatenate([filled.key_cache[0], filled.value_cache[0]], axis=1)[: request.computed]

    return of


def worst(engine: Engine, request, exact) -> float:
    """The largest error of what a request has stored, in parts of the largest number of its page and head."""
    cache, pages, right = engine._runner.cache, np.array(request.pages), exact(request)
    stored = []
    for pool, scale in ((cache.key_cache, cache.k_scale), (cache.value_cache, cache.v_scale)):
        of_pages = np.asarray(scale)[pages if cache.scale_per_page else 0 * pages]
        stored.append(np.asarray(pool[pages], np.float32) * of_pages[:, None, :, None])
    off = np.concatenate(stored, axis=2).reshape(-1, *right.shape[1:])[: len(right)] - right
    size = cache.page_size
    peaks = [
        [np.abs(x[at : at + size]).max((0, 2)) for at in range(0, len(right), size)] for x in (off, right)
    ]
    return float(np.max(np.array(peaks[0]) / np.array(peaks[1])))


def test_an_8_bit_cache_is_not_bound_to_its_first_request(uneven, exact):
    """A token of small numbers alone, then prompts of large ones: they find a cache as good as new."""
    prompt = np.random.default_rng(0).integers(LARGER, TINY.vocab_size, 11).tolist()

    def error(*before: list[int], scale_per_page=True) -> float:
        engine = Engine(uneven, **SIZES, cache_dtype=jnp.int8)
        if not scale_per_page:
            scales = {name: jnp.full((1, TINY.num_kv_heads), 1.0) for name in ("k_scale", "v_scale")}
            engine._runner.cache = engine._runner.cache.replace(**scales, scale_per_page=False)
        for tokens in before:
            engine.submit(tokens, max_new_tokens=1)
            run(engine)
        request = engine.submit(prompt, max_new_tokens=20)
        while len(request.answer) < 2:
            engine.step()
        return worst(engine, request, exact)

    assert 1e-3 < error([5], [7, 8, 9]) == error() < 2 / 127
    assert error([7, 8, 9], scale_per_page=False) > 0.5, "with scales of layers the first prompt decides"


@pytest.mark.parametrize("cache_dtype", [None, "int8", "float8_e4m3fn", "float8_e5m2"])
def test_answers_do_not_depend_on_what_was_served_before(cache_dtype):
    """Another request with the same beginning, then a token whose keys and values are 10 million times as large, in the
    page where the two part. What was found is read as what was computed, and others' pages are as good as new."""
    model = tiny_llama(dtype=jnp.float32 if cache_dtype else jnp.bfloat16)
    half = TINY.hidden_size // 2
    small, large = jnp.split(model.embedding[...], [LARGER])
    model.embedding[...] = jnp.concatenate([small.at[:, half:].set(0), large.at[:, :half].set(0)])
    keys = TINY.num_heads * TINY.head_dim
    kernel = model.layers.attention.qkv_proj.kernel
    kernel[...] = kernel[...].at[:, half:, keys:].multiply(1e7)
    prompt = np.random.default_rng(0).integers(1, LARGER, 23).tolist()
    engine = Engine(model, **{**SIZES, "num_rows": 1, "step_tokens": 32}, cache_dtype=cache_dtype)

    def served():
        """(how many tokens were found, the answer, the logits behind what the request has stored by then)"""
        request = engine.submit(prompt, max_new_tokens=30)
        while len(request.answer) < 10:
            engine.step()
        at, table = len(prompt) + 8, np.full((1, 16), -1, np.int32)
        table[0, : len(request.pages)] = request.pages
        cache = engine._runner.cache.replace(block_tables=jnp.asarray(table))
        hidden, _ = model(jnp.array([[request.tokens[at]]]), jnp.array([[at]], jnp.int32), cache)
        answer = request.answer[:10]
        engine.cancel(request)
        return request.reused, answer, np.asarray(model.logits(hidden[:, 0]), np.float32)

    reused, answer, logits = served()
    assert reused == 0
    engine._scheduler.prefixes.clear()
    other = engine.submit([*prompt[:18], *range(LARGER, LARGER + 5)], max_new_tokens=1)
    run(engine)
    assert other.done
    found, again, same = served()
    assert found == 16, "whole pages"
    assert again == answer
    np.testing.assert_allclose(same, logits, atol=1e-5 * np.abs(logits).max() if cache_dtype else 0.05)


def test_8_bit_pages_carry_their_scales(uneven, exact):
    """Shared, copied, given up and taken again, with small and large tokens in the same pages."""
    rng = np.random.default_rng(1)
    small = rng.integers(1, LARGER, 13).tolist()
    large = rng.integers(LARGER, TINY.vocab_size, 18).tolist()
    engine = Engine(uneven, **{**SIZES, "num_pages": 14, "burst": 2}, cache_dtype=jnp.int8)
    requests, errors = [], []

    def step():
        engine.step()
        errors.extend(worst(engine, request, exact) for request in requests if request.computed)

    for prompt in (
        small[:1],
        [*small[:9], *large[:2], *small[9:]],
        [*small[:9], *large[:5]],  # shares two pages, and no part of the third, of which it has three tokens
        large,
        [*large[:17], *small[:3]],
    ):
        requests.append(engine.submit(prompt, max_new_tokens=14))
        step()
        step()
    while engine.busy:
        step()
    assert any(request.reused for request in requests)
    assert any(request.preempted for request in requests)
    assert len(errors) > 20
    # A step of a page's scale is less than two parts in 127 of what it must hold.
    assert max(errors) < 2 / 127
