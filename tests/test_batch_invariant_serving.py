"""`batch_invariant` in a model, the engine and `generate`: the scores of a request's tokens are the same bits whatever
runs beside it, wherever it runs, in whichever chunks it came and whatever of it was found in the cache."""

import dataclasses
import functools
import itertools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lowering import lower_for_gpu, triton_kernels
from models_support import TINY, tiny_llama

from pallas_attn.models import DeepSeek, DeepSeekConfig, Engine, Llama, Sampling, generate, steps
from pallas_attn.models.llama_config import Experts
from pallas_attn.models.sampling import How
from pallas_attn.nn import MLAConfig
from pallas_attn.nn.indexer import IndexerConfig
from pallas_attn.nn.layers import PRECISION
from pallas_attn.ops.paged_attention.config import Candidate
from pallas_attn.ops.ragged_attention.config import RaggedAttentionConfig, RaggedTiles

SIZES: dict[str, Any] = dict(max_len=64, num_rows=8, page_size=4, step_tokens=32)
NEW = 4
CONFIG = dataclasses.replace(TINY, num_layers=2)
CONFIGS = {
    "dense": CONFIG,
    "experts": dataclasses.replace(CONFIG, experts=Experts(5, 2, 24)),
    "windows, sinks, experts with biases": dataclasses.replace(
        CONFIG,
        sliding_window=20,
        full_layers=(1,),
        sinks=True,
        qk_norm=True,
        experts=Experts(5, 2, 24, biases=True),
        activation="clipped_swiglu",
    ),
}


def tiny_deepseek(dtype, implementation: str) -> DeepSeek:
    attention = MLAConfig(hidden_size=32, num_heads=2, q_lora_rank=24, qk_nope_head_dim=16, v_head_dim=16)
    config = DeepSeekConfig(TINY.vocab_size, 2, 1, 48, 24, 4, 2, 1, attention, context_length=64)
    graph, weights = nnx.split(DeepSeek(config, dtype=dtype, implementation=implementation, rngs=nnx.Rngs(0)))
    return nnx.merge(graph, jax.tree.map(lambda leaf: leaf * 4 if leaf.ndim > 1 else leaf, weights))


def made(kind: str, dtype: str, implementation: str | None = "interpret") -> Any:
    if kind == "latents":
        return tiny_llama(jnp.dtype(dtype), implementation, config=CONFIG, attention="mla")
    if kind == "deepseek":
        return tiny_deepseek(jnp.dtype(dtype), implementation)
    return tiny_llama(jnp.dtype(dtype), implementation, config=CONFIGS[kind])


def texts(rng, *lengths: int) -> list[list[int]]:
    return [rng.integers(0, TINY.vocab_size, length).tolist() for length in lengths]


@pytest.fixture(scope="module")
def prompts() -> tuple[list[int], list[list[int]]]:
    """Of the request that is looked at, and of its neighbours."""
    mine, *others = texts(np.random.default_rng(0), 25, 50, 3, 30, 15, 1, 45, 9)
    return mine, others


@pytest.fixture
def short_splits(monkeypatch):
    """So that short texts are cut up and merged, as long ones are."""
    for op, tokens in (("paged_attention", 16), ("mla_decode", 32)):
        monkeypatch.setattr(f"pallas_attn.ops.{op}.config.INVARIANT_TOKENS", tokens)
    monkeypatch.setattr("pallas_attn.ops.paged_attention.config.CANDIDATES", (Candidate(16, 4, 1),))


def served(engine: Engine, batch, at: int, sampling=()) -> tuple[Any, list[int]]:
    """(the request at this place of the batch, the tokens of it that each step computed)"""
    engine.scores = {} if engine._invariant else None
    requests = [
        engine.submit(prompt, max_new_tokens=NEW, sampling=own)
        for prompt, own in itertools.zip_longest(batch, sampling)
    ]
    chunks, next_step = [], engine._scheduler.next_step

    def spied():
        step = next_step()
        chunks.extend(chunk.count for chunk in step.chunks if chunk.request is requests[at])
        return step

    engine._scheduler.next_step = spied
    while engine.busy:
        engine.step()
    engine._scheduler.next_step = next_step
    return requests[at], chunks


def bits(engine: Engine, request) -> bytes:
    assert engine.scores is not None
    scores = np.stack(engine.scores[request])
    assert scores.shape == (len(request.answer), engine._model.config.vocab_size)
    assert np.isfinite(scores).all()
    return scores.tobytes()


def forget(engine: Engine) -> None:
    engine._scheduler.prefixes.clear()


def everywhere(engine: Engine, mine, others, fewer: int) -> dict[str, bytes]:
    """The request's scores alone, beside others, in other rows and chunks, found in the cache and sent back. `fewer`
    pages than the last batch's prompts take bring that about."""
    alone, whole = served(engine, [mine], 0)
    found = {"alone": bits(engine, alone)}

    again, chunks = served(engine, [mine], 0)
    assert again.reused
    found["its prefix in the cache"] = bits(engine, again)

    forget(engine)
    request, chunks = served(engine, [*others[:3], mine, *others[3:]], 3)
    assert not request.reused
    assert chunks != whole
    found["fourth of eight"] = bits(engine, request)

    # It is the newest, and goes back when the others need pages.
    forget(engine)
    batch = [*others[:2], [*mine[: len(mine) * 2 // 3 + 1], 1], mine]
    pages = sum(-(-len(prompt) // engine._scheduler.page_size) for prompt in batch) - fewer
    taken = engine._scheduler.allocator.allocate(engine.free_pages - pages)
    request, _ = served(engine, batch, 3)
    engine._scheduler.allocator.free(taken)
    assert request.preempted
    assert request.reused, "pages of the one that begins as it does"
    found["last of four that have few pages"] = bits(engine, request)
    return found


@pytest.mark.once
@pytest.mark.parametrize(
    ("kind", "dtype", "cache_dtype"),
    [
        ("dense", "float32", None),
        ("dense", "bfloat16", None),
        ("dense", "bfloat16", "float8_e4m3fn"),
        pytest.param("dense", "float32", "float8_e5m2", marks=pytest.mark.slow),
        pytest.param("experts", "float32", None, marks=pytest.mark.slow),
        pytest.param("windows, sinks, experts with biases", "bfloat16", None, marks=pytest.mark.slow),
        ("windows, sinks, experts with biases", "float32", "float8_e4m3fn"),
        ("latents", "float32", None),
        ("deepseek", "float32", None),
    ],
)
@pytest.mark.sweep(cache_dtype=lambda dtype: [dtype is None])
def test_scores_are_those_of_the_request_alone(kind, dtype, cache_dtype, prompts, short_splits):
    """Of what a CPU computes nothing is promised, since its products may round the last of their rows otherwise. In
    these cases none does, so that whatever else depended on the batch would show; the rest is for `test_on_a_gpu`."""
    engine = Engine(made(kind, dtype), **SIZES, batch_invariant=True, cache_dtype=cache_dtype)
    found = everywhere(engine, *prompts, fewer=2)
    assert [name for name, scores in found.items() if scores != found["alone"]] == []


def logs(engine: Engine, batch, at: int) -> list[Any]:
    request, _ = served(engine, batch, at, [Sampling(logprobs=20)] * len(batch))
    return request.logprobs


@pytest.mark.once
def test_without_it_a_token_that_comes_among_those_of_a_prompt_is_rounded_otherwise(prompts):
    """So that the tests above could fail: products of another shape. Long ones: not every CPU adds up short ones in
    another order."""
    mine, others = prompts
    sizes = {**SIZES, "num_rows": 4, "step_tokens": 64, "prefix_cache": False}
    config = dataclasses.replace(CONFIG, intermediate_size=2048)
    engine = Engine(tiny_llama(jnp.dtype("float32"), "xla", config=config), **sizes)
    alone, beside = (logs(engine, batch, 0) for batch in ([mine], [mine, others[0], others[5]]))
    assert alone != beside
    np.testing.assert_allclose([x.logprob for x in alone], [x.logprob for x in beside], atol=1e-4)


@pytest.mark.once
def test_one_program_without_attention_that_is_invariant_is_not_enough(prompts, monkeypatch):
    """Splits follow from the batch. Of a long text, so that on any CPU some sum is rounded otherwise."""
    _, others = prompts
    (mine,) = texts(np.random.default_rng(0), 200)
    tiles = RaggedTiles(16, 16, num_splits=8, min_split_tokens=16, target_programs=8, num_stages=1)
    heuristic = "pallas_attn.ops.ragged_attention.config.heuristic"
    monkeypatch.setattr(heuristic, lambda **_: RaggedAttentionConfig(tiles))
    monkeypatch.setattr("pallas_attn.models.engine.invariant", lambda function, model: model)
    jax.clear_caches()
    config = dataclasses.replace(CONFIG, context_length=256)
    model = tiny_llama(jnp.dtype("float32"), "interpret", config=config)
    engine = Engine(model, **{**SIZES, "max_len": 256}, prefix_cache=False, batch_invariant=True)
    alone, beside = (logs(engine, *batch) for batch in (([mine], 0), ([*others[:3], mine, *others[3:]], 3)))
    jax.clear_caches()
    assert alone != beside


@pytest.mark.slow
@pytest.mark.once
def test_each_row_is_chosen_for_by_the_program_of_its_own_sampling(prompts, monkeypatch):
    mine, others = prompts
    asked, choose = [], steps.choose
    monkeypatch.setattr(steps, "choose", lambda *args, how: asked.append(how) or choose(*args, how=how))
    engine = Engine(made("dense", "float32"), **SIZES, batch_invariant=True)
    own = Sampling(temperature=1.5, seed=3, logprobs=5)
    different = [
        Sampling(),
        Sampling(logprobs=2),
        Sampling(temperature=0.7, top_p=0.5, logprobs=0),
        Sampling(temperature=2.0, repetition_penalty=1.5),
    ]
    alone, _ = served(engine, [mine], 0, [own])
    assert set(asked) == {How.of([own])}
    among = [*different, own, *different[:3]]
    request, _ = served(engine, [*others[:4], mine, *others[4:]], 4, among)
    assert set(asked) == {How.of([sampling]) for sampling in among}
    assert request.answer == alone.answer
    assert request.logprobs == alone.logprobs
    assert [len(one.top) for one in request.logprobs] == [5] * NEW
    greedy, _ = served(engine, [mine], 0)
    assert greedy.answer != alone.answer
    # Scores are those before any penalty, and of who asks.
    (first, *_), (other, *_) = engine.scores[greedy], alone.logprobs
    likeliest = int(np.argmax(first)), float(jax.nn.log_softmax(first).max())
    assert other.top[0] == pytest.approx(likeliest, abs=1e-5)


@pytest.mark.once
@pytest.mark.slow
def test_generate_answers_as_to_each_prompt_alone(prompts):
    mine, others = prompts
    model, rng = made("dense", "float32"), np.random.default_rng(1)
    more = texts(rng, *rng.integers(1, 50, 10))

    def answers(*batch, **options):
        options = dict(max_new_tokens=NEW, page_size=4, prefill_chunk=32, return_logits=True) | options
        return generate(model, batch, batch_invariant=True, **options)

    alone = answers(mine)
    assert alone.tokens.shape == (1, NEW)
    assert np.isfinite(alone.logits).all()
    assert len(np.unique(alone.logits)) > 300
    batch = [*others, mine, *more]  # of more than there are rows
    found, at = answers(*batch), batch.index(mine)
    assert found.row(at) == alone.row(0)
    assert found.logits[at].tobytes() == alone.logits[0].tobytes()
    assert found.num_prompt_tokens == sum(map(len, batch))
    assert min(found.compile_seconds, found.prefill_seconds, found.decode_seconds) > 0
    # As many as a stop token leaves, padded as without it.
    stopped = answers(others[0], mine, stop_token_ids=[alone.row(0)[1]], sampling=Sampling(logprobs=1))
    assert stopped.row(1) == alone.row(0)[:2]
    assert stopped.tokens[1, 2:].tolist() == [-1] * (NEW - 2)
    assert not stopped.logits[1, 2:].any()
    assert stopped.logits[1, :2].tobytes() == alone.logits[0, :2].tobytes()
    assert [len(of) for of in stopped.logprobs] == stopped.lengths.tolist()
    usual = generate(model, [mine], max_new_tokens=NEW, page_size=4, return_logits=True)
    assert usual.row(0) == alone.row(0)
    np.testing.assert_allclose(usual.logits, alone.logits, atol=1e-4)


def test_a_model_made_with_it_is_served_with_it():
    model = Llama(CONFIG, implementation="interpret", batch_invariant=True, rngs=nnx.Rngs(0))
    engine = Engine(model, **SIZES)
    assert engine._invariant
    assert engine._scheduler.burst == 1
    assert engine._model.layers.attention.attend.batch_invariant
    usual = Engine(made("dense", "float32"), **SIZES)
    assert not usual._invariant
    assert not usual._model.layers.attention.attend.batch_invariant
    asked = Engine(usual._model, **SIZES, batch_invariant=True)
    assert asked._model.layers.attention.attend.batch_invariant
    assert not usual._model.layers.attention.attend.batch_invariant, "the caller's stays as it is"


def with_indexer() -> DeepSeek:
    attention = MLAConfig(hidden_size=32, num_heads=2, q_lora_rank=24, qk_nope_head_dim=16, v_head_dim=16)
    config = DeepSeekConfig(
        *(64, 2, 1, 48, 24, 4, 2, 1, attention), context_length=64, indexer=IndexerConfig(2, 64, 8)
    )
    return DeepSeek(config, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: Engine(made("dense", "float32"), batch_invariant=1),
            "Engine: argument 'batch_invariant': expected True or False, got",
        ),
        (
            lambda: Engine(with_indexer(), batch_invariant=True),
            "Engine: argument 'batch_invariant': expected False for a model with indexers, got True",
        ),
        (
            lambda: DeepSeek(with_indexer().config, batch_invariant=True, rngs=nnx.Rngs(0)),
            "DeepSeek: argument 'batch_invariant': expected False for a model with indexers, got True",
        ),
        (
            lambda: Llama(CONFIG, batch_invariant=None, rngs=nnx.Rngs(0)),
            "Llama: argument 'batch_invariant': expected True or False, got",
        ),
        (
            lambda: generate(made("dense", "float32"), [[1]], batch_invariant="no"),
            "generate: argument 'batch_invariant': expected True or False, got",
        ),
        (
            lambda: Engine(made("dense", "float32"), cache_dtype="int8", batch_invariant=True),
            "create_cache: argument 'dtype': expected a floating-point one with batch_invariant (its scales are 1), "
            "got int8",
        ),
        (
            lambda: generate(made("dense", "float32", "xla"), [[1]], max_new_tokens=1, batch_invariant=True),
            "paged_attention: implementation 'xla' cannot serve this call: is not batch_invariant",
        ),
    ],
)
@pytest.mark.usefixtures("as_users_have_it")
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises((TypeError, ValueError)) as refused:
        call()
    assert str(refused.value).startswith(message)
    assert len(str(refused.value).splitlines()) == 1


def test_a_decoder_of_others_without_it_is_refused(as_users_have_it):
    model = made("dense", "float32")
    other = types.SimpleNamespace(config=model.config, create_cache=model.create_cache, logits=model.logits)
    with pytest.raises(ValueError, match="False for a SimpleNamespace, which has no such option, got True"):
        Engine(other, batch_invariant=True)


@pytest.mark.parametrize(("kind", "op"), [("dense", "paged_attention"), ("latents", "mla_decode")])
def test_on_an_h100_all_attention_is_by_the_op_that_is_invariant(kind, op):
    engine = Engine(made(kind, "bfloat16", None), **SIZES, batch_invariant=True)
    runner = engine._runner
    state = runner._weights, runner.cache, runner._tables, runner._rows, None
    arguments = *state, *runner._no_tokens(*runner._rooms)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    static = dict(graph=runner._graph, how=How(), stops=(), burst=1)
    lowered = lower_for_gpu(functools.partial(steps.scores, **static), *shapes)
    kernels = {name for name, *_ in triton_kernels(lowered)} - {"pallas_attn_write_kv"}
    assert kernels == {f"pallas_attn_{op}"}


# What a GPU runs by default.
LARGE = dataclasses.replace(
    TINY,
    vocab_size=2048,
    hidden_size=1024,
    intermediate_size=2816,
    num_layers=3,
    num_heads=16,
    num_kv_heads=4,
    head_dim=128,
    context_length=2048,
)
LARGE_SIZES = dict(max_len=1600, num_rows=16, page_size=16, step_tokens=256)


def large(kind: str, implementation: str | None) -> Any:
    dtype, experts = jnp.bfloat16, Experts(8, 2, 512)
    if kind == "deepseek":
        attention = MLAConfig(hidden_size=1024, num_heads=16, q_lora_rank=512)
        config = DeepSeekConfig(
            *(LARGE.vocab_size, 3, 1, 2816, 512, 8, 2, 1, attention), context_length=LARGE.context_length
        )
        return DeepSeek(config, dtype=dtype, implementation=implementation, rngs=nnx.Rngs(0))
    configs = {
        "dense": LARGE,
        "windows, sinks, experts": dataclasses.replace(
            LARGE, experts=experts, sliding_window=300, full_layers=(1,), sinks=True
        ),
        "latents": dataclasses.replace(LARGE, num_heads=8, head_dim=64),
    }
    attention = "mla" if kind == "latents" else "gqa"
    options: Any = dict(dtype=dtype, implementation=implementation, attention=attention)
    return Llama(configs[kind], **options, rngs=nnx.Rngs(0))


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", [None, "triton"])
@pytest.mark.parametrize(
    ("kind", "cache_dtype"),
    [
        ("dense", None),
        ("dense", "float8_e4m3fn"),
        ("windows, sinks, experts", None),
        ("latents", None),
        ("deepseek", None),
        ("deepseek", "float8_e4m3fn"),
    ],
)
def test_on_a_gpu(kind, cache_dtype, implementation, monkeypatch):
    monkeypatch.setattr(f"{__name__}.NEW", 24)
    rng = np.random.default_rng(0)
    lengths = (700, 1500, 40, 900, 300, 1, 1100, 200)
    mine, *others = (rng.integers(0, LARGE.vocab_size, length).tolist() for length in lengths)
    model = large(kind, implementation)
    engine = Engine(model, **LARGE_SIZES, batch_invariant=True, cache_dtype=cache_dtype)
    found = everywhere(engine, mine, others, fewer=16)
    # Another engine of the same sizes, in the same process.
    other = Engine(model, **LARGE_SIZES, batch_invariant=True, cache_dtype=cache_dtype)
    request, _ = served(other, [others[0], mine, others[3]], 1)
    found["in another engine"] = bits(other, request)
    assert [name for name, scores in found.items() if scores != found["alone"]] == []


@pytest.mark.gpu
def test_without_it_bits_depend_on_the_batch_on_a_gpu():
    """So that the test above could fail."""
    rng = np.random.default_rng(0)
    mine, other = (rng.integers(0, LARGE.vocab_size, length).tolist() for length in (700, 1500))
    engine = Engine(large("dense", None), **LARGE_SIZES, prefix_cache=False)
    alone, beside = (logs(engine, batch, 0) for batch in ([mine], [mine, other]))
    assert alone != beside


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [64, 256, 512])
@pytest.mark.parametrize(
    "sizes", [(4096, 6144), (4096, 28672), (14336, 4096), (576, 1536), (2048, 8192)], ids=str
)
def test_all_rows_of_a_product_are_alike_on_a_gpu(tokens, sizes):
    """What the engine's promise builds on: one row, at every place among others, of layers of published models."""
    keys = jax.random.split(jax.random.key(0), 3)
    weights, mine, others = (
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, (sizes, sizes[:1], (tokens, sizes[0])), strict=True)
    )
    product = jax.jit(lambda x, w: jnp.dot(x, w, precision=PRECISION))
    rows = [np.asarray(product(others.at[at].set(mine), weights)[at]).tobytes() for at in range(tokens)]
    assert len(set(rows)) == 1
