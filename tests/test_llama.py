"""The decoder against itself: paged decoding must give what a dense pass over the whole text gives."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models_support import TINY, tiny_llama

from pallas_attn import PagedKVCache, nn
from pallas_attn.models import Llama, LlamaConfig
from pallas_attn.nn import linen
from pallas_attn.nn.rotary import apply_rotary, rotary_angles, rotary_frequencies


def make_cache(model: Llama, num_seqs: int, max_len: int, page_size: int = 4) -> PagedKVCache:
    """Pages dealt out in no order, every sequence with room for `max_len` tokens."""
    config = model.config
    max_pages = -(-max_len // page_size)
    pages = np.random.default_rng(0).permutation(num_seqs * max_pages).astype(np.int32)
    return PagedKVCache.create(
        num_layers=config.num_layers,
        num_pages=pages.size,
        page_size=page_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_tables=jnp.asarray(pages.reshape(num_seqs, max_pages)),
        dtype=model.dtype,
    )


@nnx.jit
def run(model: Llama, tokens, positions, cache: PagedKVCache):
    """Logits of all tokens, and the cache."""
    hidden, cache = model(tokens, positions, cache)
    return model.logits(hidden), cache


def dense_logits(model: Llama, tokens: np.ndarray) -> np.ndarray:
    """Logits `[num_seqs, n, vocab_size]` of one prefill over the whole text."""
    cache = make_cache(model, *tokens.shape)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return np.asarray(run(model, jnp.asarray(tokens), positions, cache)[0])


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
@pytest.mark.sweep(implementation=None)
def test_decoding_from_pages_equals_a_dense_pass(implementation):
    model = tiny_llama(implementation=implementation)
    tokens = np.random.default_rng(1).integers(0, TINY.vocab_size, (2, 11)).astype(np.int32)
    expected = dense_logits(tiny_llama(), tokens)
    lengths = np.array([3, 6])
    columns = np.arange(6)
    positions = np.where(columns < lengths[:, None], columns, -1).astype(np.int32)

    prefill, cache = run(model, jnp.asarray(tokens[:, :6]), jnp.asarray(positions), make_cache(model, 2, 11))
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(prefill[row, :length], expected[row, :length], atol=2e-5)
    np.testing.assert_array_equal(cache.seq_lens, lengths)

    for _ in range(5):
        at = np.asarray(cache.seq_lens)
        new = tokens[np.arange(2), at][:, None]
        logits, cache = run(model, jnp.asarray(new), jnp.asarray(at[:, None]), cache)
        np.testing.assert_allclose(logits[:, 0], expected[np.arange(2), at], atol=2e-5)


def test_logits_depend_on_every_earlier_token():
    """Negative control of the test above: random weights must not make attention irrelevant."""
    model = tiny_llama()
    tokens = np.random.default_rng(2).integers(0, TINY.vocab_size, (1, 12)).astype(np.int32)
    before = dense_logits(model, tokens)[0, -1]
    for position in range(11):
        changed = tokens.copy()
        changed[0, position] = (changed[0, position] + 1) % TINY.vocab_size
        assert np.abs(dense_logits(model, changed)[0, -1] - before).max() > 1e-3


@pytest.mark.parametrize("windows", [False, True])
def test_layers_one_after_the_other_give_what_a_scan_gives(windows):
    options = {"sliding_window": 3, "full_layers": (1,)} if windows else {}
    model = tiny_llama(config=dataclasses.replace(TINY, **options))
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, TINY.vocab_size, (2, 9)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(9, dtype=jnp.int32), tokens.shape)
    cache = make_cache(model, 2, 9)
    one_by_one = nnx.jit(lambda model, cache: model(tokens, positions, cache, unstacked=model.unstacked()))
    expected, scanned = nnx.jit(lambda model, cache: model(tokens, positions, cache))(model, cache)
    got, cache = one_by_one(model, cache)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    np.testing.assert_allclose(cache.key_cache, scanned.key_cache, atol=1e-5)
    assert np.abs(expected).max() > 0.5


def test_a_finished_row_writes_nothing():
    model = tiny_llama()
    cache = make_cache(model, 2, 8)
    tokens, positions = jnp.zeros((2, 1), jnp.int32), jnp.array([[-1], [0]], jnp.int32)
    _, after = model(tokens, positions, cache)
    owned = np.asarray(cache.shared_tables[0])
    pool = np.asarray(after.key_cache).reshape(TINY.num_layers, cache.num_pages, -1)
    assert not pool[:, owned].any()
    assert pool.any()
    np.testing.assert_array_equal(after.seq_lens, [0, 1])


def test_rotary_scores_depend_on_the_distance_only():
    rng = np.random.default_rng(3)
    query, key = rng.standard_normal((2, 1, 1, 1, 16)).astype(np.float32)

    def score(at, and_at):
        transposed = [
            apply_rotary(jnp.asarray(x), *rotary_angles(jnp.array([[p]]), rotary_frequencies(16, 10000.0)))
            for x, p in ((query, at), (key, and_at))
        ]
        return float(jnp.sum(transposed[0] * transposed[1]))

    assert score(3, 1) == pytest.approx(score(45, 43), abs=1e-4)
    assert abs(score(3, 1) - score(3, 2)) > 1e-3


@pytest.mark.once
def test_bfloat16_weights_give_float32_logits_near_float32_ones():
    model = tiny_llama(jnp.bfloat16)
    tokens = np.random.default_rng(4).integers(0, TINY.vocab_size, (1, 12)).astype(np.int32)
    got, expected = dense_logits(model, tokens), dense_logits(tiny_llama(), tokens)
    assert got.dtype == np.float32
    # The median, since a few positions of a random model are chaotic: rounding nothing but its weights, all
    # arithmetic in float32, moves their logits by up to 0.8.
    errors = np.abs(got - expected).max(axis=-1) / np.abs(expected).max(axis=-1)
    assert np.median(errors) < 0.05


def test_untied_embeddings_use_their_own_table():
    config = dataclasses.replace(TINY, tie_word_embeddings=False)
    model = Llama(config, rngs=nnx.Rngs(0))
    model.lm_head[...] = jnp.zeros_like(model.lm_head[...])
    assert not np.asarray(model.logits(jnp.ones((1, TINY.hidden_size)))).any()


def test_the_linen_module_is_the_nnx_module():
    model = tiny_llama()
    rng = np.random.default_rng(5)
    query = jnp.asarray(rng.standard_normal((2, 1, 6, 8)), jnp.float32)
    key, value = jnp.asarray(rng.standard_normal((2, 2, 1, 2, 8)), jnp.float32)
    arguments = (query, key, value, make_cache(model, 2, 8), 1, jnp.zeros((2, 1), jnp.int32))
    output, cache = nn.PagedAttention(scale=0.3)(*arguments)
    applied: Any = linen.PagedAttention(scale=0.3).apply({}, *arguments)
    linen_output, linen_cache = applied
    np.testing.assert_array_equal(output, linen_output)
    np.testing.assert_array_equal(cache.key_cache, linen_cache.key_cache)
    # One token attends to itself only.
    np.testing.assert_allclose(output[:, 0], np.repeat(value[:, 0], 3, axis=1), rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 7}, "argument 'num_heads': expected a multiple of num_kv_heads (2), got 7"),
        ({"head_dim": 7}, "argument 'head_dim': expected an even number, got 7"),
        ({"num_kv_heads": 0}, "argument 'num_kv_heads': expected at least 1, got 0"),
        ({"num_layers": -1}, "argument 'num_layers': expected at least 1, got -1"),
        ({"num_heads": True}, "argument 'num_heads': expected an int, got True of type bool"),
    ],
)
def test_config_errors(change, message):
    error = TypeError if "an int" in message else ValueError
    with pytest.raises(error, match=re.escape(f"LlamaConfig: {message}")):
        LlamaConfig(**{**dataclasses.asdict(TINY), **change})


def test_forced_implementation_that_cannot_run_says_why():
    if jax.default_backend() == "gpu":
        pytest.skip("pallas runs here")
    model = tiny_llama(implementation="pallas")
    tokens = jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(ValueError, match="'pallas' cannot serve this call: needs an NVIDIA GPU"):
        model(tokens, tokens, make_cache(model, 1, 4))
