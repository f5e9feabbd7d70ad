"""A real model with an 8-bit KV cache: how far its logits move, and that its scales are what makes that little."""

import jax.numpy as jnp
import numpy as np
import pytest
from models_support import smollm2

from pallas_attn import PagedKVCache
from pallas_attn.models import generate

PROMPTS = ["What is photosynthesis?", "Give three tips for learning to cook."]

# Largest |logit difference| over the standard deviation of the logits, measured with some room: SmolLM2's keys have
# outlier channels, and fp8 keeps 3 (e4m3) or 2 (e5m2) bits of mantissa of each value.
MOVES_AT_MOST = {"int8": 0.5, "float8_e4m3fn": 0.9, "float8_e5m2": 1.8}


@pytest.fixture(scope="module")
def exact():
    loaded = smollm2()
    chats = [loaded.tokenizer.apply_chat_template([{"role": "user", "content": p}]) for p in PROMPTS]
    prompts = [loaded.tokenizer.encode(chat) for chat in chats]
    return loaded.model, prompts, generate(loaded.model, prompts, max_new_tokens=16, return_logits=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", MOVES_AT_MOST)
def test_logits_move_little(exact, dtype):
    model, prompts, full = exact
    stored = generate(model, prompts, max_new_tokens=16, return_logits=True, cache_dtype=dtype)
    moved = 0.0
    for row in range(len(prompts)):
        # Up to and including the first token on which the answers part, both saw the same text.
        same = full.tokens[row] == stored.tokens[row]
        steps = len(same) if same.all() else int(np.argmin(same)) + 1
        assert steps >= 3, f"prompt {row} parts after {steps - 1} tokens"
        difference = np.abs(full.logits[row, :steps] - stored.logits[row, :steps]).max()
        moved = max(moved, float(difference / full.logits[row, :steps].std()))
    assert 0 < moved < MOVES_AT_MOST[dtype]


def test_calibration_fits_each_head_of_a_layer():
    tables = jnp.array([[0, 1]], jnp.int32)
    sizes = {"num_layers": 2, "num_pages": 2, "page_size": 8, "num_kv_heads": 2, "head_dim": 4}
    cache = PagedKVCache.create(**sizes, block_tables=tables, dtype=jnp.int8)
    key = jnp.zeros((1, 3, 2, 4)).at[0, 0, 0, 0].set(-12.7).at[0, 1, 1, 2].set(254.0).at[0, 2].set(1e6)
    positions = jnp.array([[0, 1, -1]], jnp.int32)  # the last token is padding
    fitted = cache.calibrate(1, key, jnp.zeros_like(key), positions, margin=1.0)
    np.testing.assert_allclose(fitted.k_scale, [[1, 1], [0.1, 2.0]], rtol=1e-6)
    np.testing.assert_allclose(fitted.v_scale, 1)
    written = fitted.write(1, key, jnp.zeros_like(key), positions)
    assert written.key_cache[2, 0, 0, 0] == -127
    assert written.key_cache[2, 1, 1, 2] == 127


def test_calibration_leaves_other_dtypes_alone():
    sizes = {"num_layers": 1, "num_pages": 1, "page_size": 8, "num_kv_heads": 2, "head_dim": 4}
    cache = PagedKVCache.create(**sizes, block_tables=jnp.zeros((1, 1), jnp.int32), dtype=jnp.bfloat16)
    new = jnp.ones((1, 1, 2, 4))
    assert cache.calibrate(0, new, new, jnp.zeros((1, 1), jnp.int32)) is cache
    assert cache.scales(0) == {}
