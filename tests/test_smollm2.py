"""SmolLM2-135M-Instruct: real activations, with outlier channels, and sinks that take most of the weight.

One run of ours, which transformers' is held against, and ours in other ways: through MLA, with an 8-bit cache.
"""

import functools

import jax
import numpy as np
import pytest
from flax import nnx
from models_support import import_torch, smollm2

from pallas_attn.models import Generation, Llama, default_model_path, generate

pytestmark = [pytest.mark.once, pytest.mark.slow]


@pytest.fixture(autouse=True, scope="module")
def optimised():
    """With LLVM's optimisations, unlike the other tests: these programs are few, and run for seconds."""
    hurried = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", hurried)


QUESTIONS = ["What is the capital of France?", "Explain in two sentences why the sky is blue.", "Hi"]

# Largest |logit difference| over the standard deviation of the logits, measured with some room: SmolLM2's keys have
# outlier channels, and fp8 keeps 3 (e4m3) or 2 (e5m2) bits of mantissa of each value.
MOVES_AT_MOST = {"int8": 0.5, "float8_e4m3fn": 0.9, "float8_e5m2": 1.8}


def prompts() -> list[list[int]]:
    tokenizer = smollm2().tokenizer
    chats = [tokenizer.apply_chat_template([{"role": "user", "content": question}]) for question in QUESTIONS]
    return [tokenizer.encode(chat) for chat in chats]


STEPS = 4  # with an 8-bit cache: each reads all of the prompt's, and a CPU takes seconds to emulate e4m3


@functools.cache
def ours() -> Generation:
    """No stop tokens: every row runs all steps, past the end of a page."""
    return generate(smollm2().model, prompts(), max_new_tokens=16, return_logits=True)


def test_tokens_and_logits_are_those_of_transformers():
    import_torch()
    from pallas_attn.models.compare import TransformersModel, compare

    tokenizer = smollm2().tokenizer
    assert tokenizer.vocab_size == smollm2().model.config.vocab_size
    assert "Paris" in tokenizer.decode(ours().row(0))
    assert tokenizer.eos_token_id in ours().row(0)[:12]
    reference = TransformersModel(default_model_path(), "float32")
    for row in compare(reference, prompts(), ours(), stop_token_ids=()):
        assert row.tokens_equal, row
        assert row.num_tokens == 16
        assert row.max_logit_difference < 2e-3


def test_mla_gives_the_same_tokens():
    """Keys and values packed for `mla_decode`; the weights are the same arrays."""
    _, weights = nnx.split(smollm2().model)
    config = smollm2().model.config
    skeleton = nnx.eval_shape(lambda: Llama(config, attention="mla", rngs=nnx.Rngs(0)))
    model = nnx.merge(nnx.graphdef(skeleton), weights)
    packed = generate(model, prompts(), max_new_tokens=16, return_logits=True)
    np.testing.assert_array_equal(packed.tokens, ours().tokens)
    np.testing.assert_allclose(packed.logits, ours().logits, atol=2e-3)


@pytest.mark.parametrize("dtype", MOVES_AT_MOST)
def test_an_8_bit_cache_moves_logits_little(dtype):
    stored = generate(smollm2().model, prompts(), max_new_tokens=STEPS, return_logits=True, cache_dtype=dtype)
    moved, seen = 0.0, 0
    for row in range(len(QUESTIONS)):
        full = ours().logits[row, :STEPS]
        # Up to and including the first token on which the answers part, both saw the same text.
        same = ours().tokens[row, :STEPS] == stored.tokens[row]
        steps = len(same) if same.all() else int(np.argmin(same)) + 1
        seen += steps
        difference = np.abs(full[:steps] - stored.logits[row, :steps]).max()
        moved = max(moved, float(difference / full[:steps].std()))
    # One may part at once: the first answer's likeliest two tokens are 0.02 apart.
    assert seen >= 3 * len(QUESTIONS), f"answers part after {seen} tokens together"
    assert 0 < moved < MOVES_AT_MOST[dtype]
