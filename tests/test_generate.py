"""Generation on a tiny random model: the loop, its stopping, its sampling, its memory and its errors."""

import functools
import importlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lowering import lower_for_gpu, triton_kernels
from models_support import TINY, tiny_llama

from pallas_attn.models import generate, sampling

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11]]


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


def test_a_batch_answers_as_each_prompt_alone(model):
    batch = generate(model, PROMPTS, max_new_tokens=12, page_size=4)
    for index, prompt in enumerate(PROMPTS):
        alone = generate(model, [prompt], max_new_tokens=12, page_size=16)
        assert batch.row(index) == alone.row(0)
    assert batch.lengths.tolist() == [12, 12, 12]
    assert batch.num_prompt_tokens == 11


def test_a_row_stops_at_a_stop_token_and_the_rest_goes_on(model):
    free = generate(model, PROMPTS, max_new_tokens=12, page_size=4)
    stop = free.row(0)[4]
    stopped = generate(model, PROMPTS, max_new_tokens=12, page_size=4, stop_token_ids=[stop, 1000000])
    for index in range(3):
        row = free.row(index)
        expected = row[: row.index(stop) + 1] if stop in row else row
        assert stopped.row(index) == expected
        assert (stopped.tokens[index, len(expected) :] == -1).all()
    assert stopped.lengths[0] <= 5 < max(stopped.lengths)


def test_the_loop_ends_when_every_row_has(model):
    everything = range(TINY.vocab_size)
    reports = []
    answer = generate(
        model, PROMPTS, max_new_tokens=40, stop_token_ids=everything, progress=lambda *r: reports.append(r)
    )
    assert answer.lengths.tolist() == [1, 1, 1]
    assert reports == [(1, 40)]


def test_progress_changes_nothing_but_is_reported(model):
    reports = []
    with_progress = generate(
        model, PROMPTS, max_new_tokens=12, page_size=4, progress=lambda *r: reports.append(r)
    )
    np.testing.assert_array_equal(
        with_progress.tokens, generate(model, PROMPTS, max_new_tokens=12, page_size=4).tokens
    )
    assert reports == [(8, 12), (12, 12)]


def test_logits_are_those_the_tokens_were_chosen_from(model):
    answer = generate(model, PROMPTS, max_new_tokens=6, return_logits=True)
    assert answer.logits is not None
    assert answer.logits.shape == (3, 6, TINY.vocab_size)
    np.testing.assert_array_equal(answer.logits.argmax(-1), answer.tokens)


def test_sampling_repeats_with_its_seed_only(model):
    def draw(seed):
        options = {"temperature": 1.5, "top_p": 0.95, "seed": seed}
        return generate(model, PROMPTS, max_new_tokens=12, page_size=4, **options).tokens

    np.testing.assert_array_equal(draw(1), draw(1))
    assert (draw(1) != draw(2)).any()


def test_a_tiny_nucleus_is_greedy(model):
    np.testing.assert_array_equal(
        generate(model, PROMPTS, max_new_tokens=12, page_size=4, temperature=0.7, top_p=1e-6).tokens,
        generate(model, PROMPTS, max_new_tokens=12, page_size=4).tokens,
    )


def test_sampling_follows_the_nucleus_distribution():
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    logits = jnp.broadcast_to(jnp.log(probabilities).astype(jnp.float32), (20000, 4))
    tokens = sampling.sample(logits, jax.random.key(0), jnp.float32(1.0), jnp.float32(0.9))
    frequencies = np.bincount(np.asarray(tokens), minlength=4) / 20000
    np.testing.assert_allclose(frequencies, np.array([0.5, 0.3, 0.15, 0]) / 0.95, atol=0.015)
    cold = sampling.sample(logits, jax.random.key(0), jnp.float32(0.5), jnp.float32(1.0))
    frequencies = np.bincount(np.asarray(cold), minlength=4) / 20000
    np.testing.assert_allclose(frequencies, probabilities**2 / (probabilities**2).sum(), atol=0.015)


@pytest.fixture
def programs(monkeypatch) -> dict[str, Any]:
    """{"_prefill" and "_decode": (what `generate` lowered, the arguments, the static arguments)}."""
    module = importlib.import_module("pallas_attn.models.generate")
    seen = {}

    def spy_on(name):
        program = getattr(module, name)

        class Spy:
            def lower(self, *arguments, **static):
                lowered = program.lower(*arguments, **static)
                seen[name] = (lowered, arguments, static)
                return lowered

        monkeypatch.setattr(module, name, Spy())
        seen[f"{name} itself"] = program

    spy_on("_prefill")
    spy_on("_decode")
    return seen


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_decoding_is_one_loop_that_updates_the_pool_in_place(dtype, programs):
    # 23 pages a layer: the pool's shape is no other array's.
    generate(tiny_llama(dtype), PROMPTS, max_new_tokens=9, page_size=4, num_pages=23)
    pool = f"[{23 * TINY.num_layers},4,{TINY.num_kv_heads},{TINY.head_dim}]"
    for name in ("_prefill", "_decode"):
        text = programs[name][0].compile().as_text()
        made = re.findall(rf"= \w+{re.escape(pool)}\S* ([\w-]+)\(", text)
        assert "scatter" in made, f"{name}: expected the pool to be written, found {made}"
        # "fusion" and "call" wrap the scatters; what they hold is in the list as well.
        unwanted = set(made) - {"parameter", "get-tuple-element", "scatter", "fusion", "call", "bitcast"}
        assert not unwanted, f"{name} makes new pools: {unwanted}"
        aliases = text.split("input_output_alias=", 1)[1].split("entry_computation_layout", 1)[0]
        assert "{0}:" in aliases
        assert "{1}:" in aliases
    decode = programs["_decode"][0]
    assert "callback" not in decode.as_text()
    assert " while(" in decode.compile().as_text().split("ENTRY", 1)[1]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_loop_lowers_for_an_h100_with_our_kernels_inside(dtype, programs):
    generate(tiny_llama(dtype), PROMPTS, max_new_tokens=9, page_size=4)
    _, arguments, static = programs["_decode"]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    static = {**static, "graph": nnx.graphdef(tiny_llama(dtype, implementation="pallas"))}
    lowered = lower_for_gpu(functools.partial(programs["_decode itself"], **static), *shapes)
    kernels = {name for name, *_ in triton_kernels(lowered)}
    assert {"pallas_attn_write_kv", "pallas_attn_paged_attention"} <= kernels
    # Nothing in the loop waits for the host.
    assert "callback" not in lowered.as_text()


def test_the_pool_check_notices_a_copy():
    """Negative control of the test above."""
    program = jax.jit(lambda pool: (pool, pool.at[1].set(0.0)))
    text = program.lower(jnp.zeros((69, 4, 2, 8))).compile().as_text() or ""
    assert "copy" in re.findall(r"= \w+\[69,4,2,8\]\S* ([\w-]+)\(", text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": []}, "argument 'prompts': expected at least one prompt, got none"),
        ({"prompts": [[1], []]}, "argument 'prompts[1]': expected at least one token, got none"),
        ({"prompts": [[1, 97]]}, "argument 'prompts[0]': expected token ids in [0, 97), got 97"),
        ({"prompts": [[-1]]}, "argument 'prompts[0]': expected token ids in [0, 97), got -1"),
        (
            {"num_pages": 2},
            "argument 'num_pages': expected at least one page for each of 3 prompts, got 2",
        ),
        (
            {"num_pages": 3, "page_size": 4},
            "argument 'prompts[1]': expected prompt and max_new_tokens of together at most 3 pages x 4 = "
            "12 tokens (the cache), got 7 + 8 tokens",
        ),
        (
            {"num_pages": 5, "page_size": 4},
            "argument 'num_pages': expected at least 10 (3 prompts with max_new_tokens=8), got 5",
        ),
        (
            {"prompts": [[1], [2] * 60]},
            "argument 'prompts[1]': expected prompt and max_new_tokens of together at most 64 tokens "
            "(the model's context), got 60 + 8 tokens",
        ),
        ({"max_new_tokens": 0}, "argument 'max_new_tokens': expected at least 1, got 0"),
        ({"page_size": 0}, "argument 'page_size': expected at least 1, got 0"),
        ({"temperature": -1.0}, "argument 'temperature': expected a finite number of at least 0, got -1.0"),
        ({"temperature": float("nan")}, "argument 'temperature': expected a finite number"),
        ({"top_p": 0.0}, "argument 'top_p': expected a number in (0, 1], got 0.0"),
    ],
)
def test_errors_name_what_was_expected_and_given(model, changes, message):
    arguments = {"prompts": PROMPTS, "max_new_tokens": 8, **changes}
    with pytest.raises(ValueError, match=f"^generate: {re.escape(message)}") as raised:
        generate(model, **arguments)
    assert "\n" not in str(raised.value)
