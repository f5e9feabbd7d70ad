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
from models_support import TINY, tiny_llama, write_tiny
from support import unchecked

from pallas_attn.models import Sampling, choosing, generate, load_gguf
from pallas_attn.models.sampling import How, Rows

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11]]


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.mark.once
@pytest.mark.slow
def test_a_batch_answers_as_each_prompt_alone(model):
    batch = generate(model, PROMPTS, max_new_tokens=12, page_size=4)
    for index, prompt in enumerate(PROMPTS):
        alone = generate(model, [prompt], max_new_tokens=12, page_size=16)
        assert batch.row(index) == alone.row(0)
    assert batch.lengths.tolist() == [12, 12, 12]
    assert batch.num_prompt_tokens == 11


@pytest.mark.once
def test_a_row_stops_at_a_stop_token_and_the_rest_goes_on(model):
    free = generate(model, PROMPTS, max_new_tokens=12, page_size=4)
    stop = free.row(0)[4]
    stopped = generate(model, PROMPTS, max_new_tokens=12, page_size=4, stop_token_ids=[stop, 96])
    for index in range(3):
        row = free.row(index)
        expected = row[: row.index(stop) + 1] if stop in row else row
        assert stopped.row(index) == expected
        assert (stopped.tokens[index, len(expected) :] == -1).all()
    assert stopped.lengths[0] <= 5 < max(stopped.lengths)


@pytest.mark.parametrize("chunk", [3, 1, 5, 100])
def test_prompts_may_be_read_in_chunks(model, chunk):
    """That end at, before and behind the ends of prompts."""
    whole = generate(model, PROMPTS, max_new_tokens=4, page_size=4, return_logits=True)
    chunked = generate(model, PROMPTS, max_new_tokens=4, page_size=4, return_logits=True, prefill_chunk=chunk)
    np.testing.assert_array_equal(chunked.tokens, whole.tokens)
    np.testing.assert_allclose(chunked.logits, whole.logits, atol=2e-5)


@pytest.mark.once
@pytest.mark.slow
def test_prompts_see_an_8_bit_cache_as_it_is_stored(model):
    """Whole or token by token: a single token begins each page then, and what follows may be larger."""
    options = dict(max_new_tokens=1, page_size=5, return_logits=True)
    plain, whole, single = (
        generate(model, PROMPTS, **options, **more).logits
        for more in ({}, {"cache_dtype": "int8"}, {"cache_dtype": "int8", "prefill_chunk": 1})
    )
    for quantised in (whole, single):
        off = np.linalg.norm(quantised - plain) / np.linalg.norm(plain)
        assert 1e-3 < off < 0.05


@pytest.mark.once
def test_the_loop_ends_when_every_row_has(model):
    everything = range(TINY.vocab_size)
    reports = []
    answer = generate(
        model, PROMPTS, max_new_tokens=40, stop_token_ids=everything, progress=lambda *r: reports.append(r)
    )
    assert answer.lengths.tolist() == [1, 1, 1]
    assert reports == [(1, 40)]


@pytest.fixture
def loop(monkeypatch):
    """The module of `generate`, which a package's function of the same name hides."""
    return importlib.import_module("pallas_attn.models.generate")


@pytest.mark.once
def test_calls_of_the_loop_change_nothing_but_are_reported(model, loop, monkeypatch):
    whole = generate(model, PROMPTS, max_new_tokens=12, page_size=4, sampling=Sampling(1.5, seed=3))
    stretches = iter([2, 3, 100, 100])
    monkeypatch.setattr(loop, "_next_stretch", lambda steps, seconds: next(stretches))
    reports = []
    options = dict(sampling=Sampling(1.5, seed=3), progress=lambda *r: reports.append(r))
    cut = generate(model, PROMPTS, max_new_tokens=12, page_size=4, **options)
    np.testing.assert_array_equal(cut.tokens, whole.tokens)
    assert reports == [(1, 12), (2, 12), (4, 12), (7, 12), (12, 12)]


def test_the_host_is_back_within_half_a_second(loop):
    """Whatever a step takes; the first call makes one."""
    for step_seconds in (1e-5, 1e-3, 0.01, 0.4):
        steps, longest = 1, 0.0
        for _ in range(30):
            longest = max(longest, steps * step_seconds)
            steps = loop._next_stretch(steps, steps * step_seconds)
        assert longest <= max(0.3, step_seconds)
        assert steps == pytest.approx(max(1, 0.25 / step_seconds), rel=0.1), "and not much sooner"


@pytest.mark.once
def test_logits_are_those_the_tokens_were_chosen_from(model):
    answer = generate(model, PROMPTS, max_new_tokens=4, page_size=4, return_logits=True)
    assert answer.logits is not None
    assert answer.logits.shape == (3, 4, TINY.vocab_size)
    np.testing.assert_array_equal(answer.logits.argmax(-1), answer.tokens)


@pytest.mark.once
def test_sampling_repeats_with_its_seed_only(model):
    def draw(seed):
        sampling = Sampling(1.5, top_p=0.95, seed=seed)
        return generate(model, PROMPTS, max_new_tokens=12, page_size=4, sampling=sampling).tokens

    np.testing.assert_array_equal(draw(1), draw(1))
    assert (draw(1) != draw(2)).any()


def test_a_tiny_nucleus_is_greedy(model):
    np.testing.assert_array_equal(
        generate(model, PROMPTS, max_new_tokens=12, page_size=4, sampling=Sampling(0.7, top_p=1e-6)).tokens,
        generate(model, PROMPTS, max_new_tokens=12, page_size=4).tokens,
    )


def drawn(logits, **options) -> np.ndarray:
    """Of rows with the same settings, each at a place of its own."""
    one, places = Sampling(**options), jnp.arange(len(logits), dtype=jnp.int32)
    rows = Rows.of([one] * len(logits))
    return np.asarray(jax.jit(choosing.choose, static_argnums=3)(logits, places, rows, How.of([one])))


def test_sampling_follows_the_nucleus_distribution():
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    logits = jnp.broadcast_to(jnp.log(probabilities).astype(jnp.float32), (20000, 4))
    frequencies = np.bincount(drawn(logits, temperature=1.0, top_p=0.9), minlength=4) / 20000
    np.testing.assert_allclose(frequencies, np.array([0.5, 0.3, 0.15, 0]) / 0.95, atol=0.015)
    frequencies = np.bincount(drawn(logits, temperature=0.5), minlength=4) / 20000
    np.testing.assert_allclose(frequencies, probabilities**2 / (probabilities**2).sum(), atol=0.015)


def test_the_nucleus_ends_where_top_p_is_reached():
    logits = jnp.broadcast_to(jnp.array([2.0, 1.0, 0.5, -1.0]), (300, 4))
    reached = float(jax.nn.softmax(logits[0])[0])  # by the first token alone
    assert set(drawn(logits, temperature=1.0, top_p=reached).tolist()) == {0}
    assert set(drawn(logits, temperature=1.0, top_p=reached + 1e-5).tolist()) == {0, 1}


@pytest.mark.parametrize("temperature", [1.2e-38, 1e-30, 1e-4])
def test_the_smallest_temperatures_take_the_likeliest_token(temperature):
    logits = 50 * jax.random.normal(jax.random.key(1), (20, 97))
    for top_p in (1.0, 0.9, 1e-45):
        np.testing.assert_array_equal(
            drawn(logits, temperature=temperature, top_p=top_p), choosing.greedy(logits)
        )


@pytest.mark.once
def test_a_temperature_that_float32_cannot_divide_by_is_greedy(model):
    for temperature in (1e-40, 5e-324):
        tiny = generate(model, PROMPTS, max_new_tokens=12, page_size=4, sampling=Sampling(temperature))
        greedy = generate(model, PROMPTS, max_new_tokens=12, page_size=4)
        np.testing.assert_array_equal(tiny.tokens, greedy.tokens)


@functools.cache
def programs(dtype: Any, cache_dtype: str | None) -> dict[str, Any]:
    """{"_prefill" and "_decode": (what `generate` lowered, the arguments, the static arguments)}."""
    module = importlib.import_module("pallas_attn.models.generate")
    seen = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_prefill", "_decode"):
            program = seen[f"{name} itself"] = getattr(module, name)

            class Spy:
                def lower(self, *arguments, program=program, name=name, **static):
                    lowered = program.lower(*arguments, **static)
                    seen[name] = (lowered, arguments, static)
                    return lowered

            patch.setattr(module, name, Spy())
        # 23 pages a layer: the pool's shape is no other array's.
        options = dict(max_new_tokens=9, page_size=4, num_pages=23, cache_dtype=cache_dtype)
        generate(tiny_llama(dtype), PROMPTS, **options)
    return seen


STORED = pytest.mark.parametrize(
    ("dtype", "cache_dtype"), [(jnp.float32, None), (jnp.bfloat16, None), (jnp.bfloat16, "int8")]
)


@STORED
def test_decoding_is_one_loop_that_updates_the_pool_in_place(dtype, cache_dtype):
    made_for = programs(dtype, cache_dtype)
    pool = f"[{23 * TINY.num_layers},4,{TINY.num_kv_heads},{TINY.head_dim}]"
    for name in ("_prefill", "_decode"):
        text = made_for[name][0].compile().as_text()
        made = re.findall(rf"= \w+{re.escape(pool)}\S* ([\w-]+)\(", text)
        assert "scatter" in made, f"{name}: expected the pool to be written, found {made}"
        # "fusion" and "call" wrap the scatters; what they hold is in the list as well.
        wanted = {"parameter", "get-tuple-element", "scatter", "fusion", "call", "bitcast"}
        # Pages whose scales grow are written one by one.
        unwanted = set(made) - wanted - ({"dynamic-update-slice"} if cache_dtype else set())
        assert not unwanted, f"{name} makes new pools: {unwanted}"
        aliases = text.split("input_output_alias=", 1)[1].split("entry_computation_layout", 1)[0]
        assert "{0}:" in aliases
        assert "{1}:" in aliases
    decode = made_for["_decode"][0]
    assert "callback" not in decode.as_text()
    assert " while(" in decode.compile().as_text().split("ENTRY", 1)[1]


@STORED
def test_the_loop_lowers_for_an_h100_with_our_kernels_inside(dtype, cache_dtype):
    made_for = programs(dtype, cache_dtype)
    _, arguments, static = made_for["_decode"]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    static = {**static, "graph": nnx.graphdef(tiny_llama(dtype, implementation="pallas"))}
    lowered = lower_for_gpu(functools.partial(made_for["_decode itself"], **static), *shapes)
    kernels = {name for name, *_ in triton_kernels(lowered)}
    assert {"pallas_attn_write_kv", "pallas_attn_paged_attention"} <= kernels
    assert ("pallas_attn_grow_pages" in kernels) == (cache_dtype is not None)
    # Nothing in the loop waits for the host, and its layers are no loop of their own.
    assert "callback" not in lowered.as_text()
    assert lowered.as_text().count("stablehlo.while") == 1


@pytest.mark.control
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
        ({"prefill_chunk": 0}, "argument 'prefill_chunk': expected at least 1, got 0"),
    ],
)
def test_errors_name_what_was_expected_and_given(model, changes, message):
    arguments = {"prompts": PROMPTS, "max_new_tokens": 8, **changes}
    with pytest.raises(ValueError, match=f"^generate: {re.escape(message)}") as raised:
        generate(model, **arguments)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": "abc"}, "argument 'prompts': expected a sequence of prompts, got 'abc' of type str"),
        ({"prompts": 5}, "argument 'prompts': expected a sequence of prompts, got 5 of type int"),
        (
            {"prompts": ["abc"]},
            "argument 'prompts[0]': expected a sequence of int token ids, got 'abc' of type str",
        ),
        (
            {"prompts": [1, 2]},
            "argument 'prompts[0]': expected a sequence of int token ids, got 1 of type int",
        ),
        (
            {"prompts": [[1], [1, 1.5]]},
            "argument 'prompts[1]': expected a sequence of int token ids, got 1.5 of type float among them",
        ),
        (
            {"prompts": [np.ones(3)]},
            "argument 'prompts[0]': expected a sequence of int token ids, got 1.0 of type",
        ),
        (
            {"prompts": [[True]]},
            "argument 'prompts[0]': expected a sequence of int token ids, got True of type bool",
        ),
        (
            {"stop_token_ids": [2.5]},
            "argument 'stop_token_ids': expected a sequence of int token ids, got 2.5",
        ),
        ({"num_pages": 2.0}, "argument 'num_pages': expected an int, got 2.0 of type float"),
        (
            {"sampling": 0.5},
            "argument 'sampling': expected a Sampling, one for each prompt, or None, got 0.5",
        ),
    ],
)
def test_wrong_types_are_named(model, changes, message):
    with pytest.raises(TypeError, match=f"^generate: {re.escape(message)}"):
        unchecked(generate)(model, **{"prompts": PROMPTS, "max_new_tokens": 8, **changes})


@pytest.mark.once
def test_prompts_may_be_arrays(model):
    arrays = [np.array(prompt, np.int64) for prompt in PROMPTS[:2]] + [jnp.array(PROMPTS[2])]
    got = unchecked(generate)(model, arrays, max_new_tokens=12, page_size=4)
    whole = generate(model, PROMPTS, max_new_tokens=12, page_size=4)
    np.testing.assert_array_equal(got.tokens, whole.tokens)


def test_a_model_that_cannot_be_run_is_named(tmp_path):
    def refusal(model: Any) -> str:
        with pytest.raises(TypeError) as raised:
            unchecked(generate)(model, PROMPTS)
        return str(raised.value)

    wanted = (
        "generate: argument 'model': expected a Llama or a DeepSeek, or a decoder with their methods, got a "
    )
    assert refusal(load_gguf(write_tiny(tmp_path / "tiny.gguf"))) == f"{wanted}LoadedModel: pass its .model"
    assert refusal(object()) == f"{wanted}object without create_cache"
