"""The engine: whatever runs beside a request, its tokens are those it gets alone."""

import contextlib
import dataclasses
import random
import re

import jax
import numpy as np
import pytest
from engine_support import HOST, Interrupts, check_pages, run
from flax import nnx
from models_support import TINY, tiny_llama

from pallas_attn.models import DeepSeek, DeepSeekConfig, Engine, Sampling, generate
from pallas_attn.nn import MLAConfig

pytestmark = pytest.mark.once  # what it is made of is tested on both

LENGTHS = {3: 20, 17: 5, 1: 30, 30: 10, 9: 30, 22: 20}
"""Tokens of each prompt: tokens of its answer."""
SIZES = dict(max_len=64, num_rows=4, page_size=4, step_tokens=16)


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture(scope="module")
def alone(model) -> list[tuple[list[int], list[int]]]:
    """(prompt, its greedy answer by itself). The last begins as the fourth does."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, TINY.vocab_size, n).tolist() for n in LENGTHS]
    prompts.append([*prompts[3][:27], 5])
    news = [*LENGTHS.values(), 12]
    # One batch, which answers as each prompt alone (test_generate.py).
    answers = generate(model, prompts, max_new_tokens=max(news), page_size=4)
    return [(prompt, answers.row(i)[:new]) for i, (prompt, new) in enumerate(zip(prompts, news, strict=True))]


@pytest.mark.parametrize(
    ("options", "preempts", "reuses"),
    [
        ({"step_tokens": 256}, False, True),
        ({"num_pages": 16}, True, True),
        ({"num_pages": 16, "prefix_cache": False, "burst": 1}, True, False),
    ],
    ids=["room for all, steps of two sizes", "few pages", "few pages, nothing shared"],
)
def test_tokens_are_those_of_each_request_alone(model, alone, options, preempts, reuses):
    engine = Engine(model, **{**SIZES, **options})
    requests = [engine.submit(prompt, max_new_tokens=len(answer)) for prompt, answer in alone[:4]]
    for _ in range(3):
        engine.step()
    for prompt, answer in alone[4:]:  # they join while others are under way
        requests.append(engine.submit(prompt, max_new_tokens=len(answer)))
        engine.step()
    run(engine)
    assert [request.answer for request in requests] == [answer for _, answer in alone]
    assert any(request.preempted for request in requests) == preempts
    assert any(request.reused for request in requests) == reuses
    rooms = {256, 32} if "step_tokens" in options else {SIZES["step_tokens"]}
    assert {room for _, room, _ in engine._runner.programs} == {SIZES["num_rows"], *rooms}


def test_equal_prefixes_take_no_pages_twice(model, alone):
    engine = Engine(model, **{**SIZES, "num_pages": 24})
    prompt, answer = alone[3]  # 30 tokens: seven full pages and a half
    first = engine.submit(prompt, max_new_tokens=1)
    run(engine)
    assert engine.free_pages == 24 - 7
    second, third = (engine.submit([*prompt[:29], last], max_new_tokens=4) for last in (prompt[29], 96))
    engine.step()
    assert (second.reused, third.cached_tokens) == (28, 28)
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.cached_tokens, stats.cached_pages) == (90, 56, 7)
    # Seven pages are shared, which is all that is remembered; each has an eighth of its own.
    assert engine.free_pages == 24 - 7 - 2
    run(engine)
    assert first.answer == answer[:1]
    assert second.answer == answer[:4]
    expected = generate(model, [[*prompt[:29], 96]], max_new_tokens=4, page_size=4)
    assert third.answer == expected.row(0), "what others wrote behind the prefix is not in its own"


def test_a_request_may_be_cancelled_at_any_time(model, alone):
    engine = Engine(model, **{**SIZES, "num_rows": 2, "prefix_cache": False})
    free = engine.free_pages
    running, other, waiting = (engine.submit(prompt, max_new_tokens=30) for prompt, _ in alone[:3])
    for _ in range(4):
        engine.step()
    had = list(running.answer)
    engine.cancel(running)
    engine.cancel(waiting)
    run(engine)
    engine.cancel(other)  # has ended: nothing happens
    assert running.done
    assert running.answer == had
    assert had == alone[0][1][: len(had)]
    assert not waiting.answer
    assert len(other.answer) == 30
    assert [request.finish_reason for request in (running, other, waiting)] == [
        "cancelled",
        "length",
        "cancelled",
    ]
    assert engine.free_pages == free


def test_tokens_are_streamed_while_others_go_on(model, alone):
    engine = Engine(model, **SIZES)
    other = engine.submit(alone[0][0], max_new_tokens=len(alone[0][1]))
    prompt, answer = alone[2]
    request = engine.submit(prompt, max_new_tokens=len(answer))
    stream = engine.stream(request)
    assert [next(stream) for _ in range(3)] == answer[:3]
    assert not request.done
    assert list(stream) == answer[3:]
    run(engine)
    assert other.answer == alone[0][1]
    left_early = engine.stream(engine.submit(prompt, max_new_tokens=20))
    assert next(left_early) == answer[0]
    left_early.close()
    assert not engine.busy
    assert list(engine.stream(engine.submit(prompt, max_new_tokens=20), stop=lambda: True)) == []
    assert not engine.busy


def test_a_stop_token_ends_an_answer_in_the_middle_of_a_burst(model, alone):
    prompt, answer = alone[2]
    stop = answer[5]
    engine = Engine(model, **SIZES, stop_token_ids=[stop])
    request = engine.submit(prompt, max_new_tokens=30)
    run(engine)
    assert request.answer == answer[: answer.index(stop) + 1]
    assert request.finish_reason == "stop"


def test_what_is_drawn_depends_on_the_seed_and_the_place_alone(model, alone):
    prompts = [prompt for prompt, _ in alone[:4]]
    settings = [Sampling(temperature=1.5, top_k=20, top_p=0.95, seed=seed) for seed in range(4)]
    settings[1] = Sampling()

    def answers(order=range(4), others=0) -> list[list[int]]:
        engine = Engine(model, **SIZES)
        for _ in range(others):
            engine.submit([3] * 9, max_new_tokens=7)
            engine.step()
        requests = {i: engine.submit(prompts[i], max_new_tokens=15, sampling=settings[i]) for i in order}
        run(engine)
        return [requests[i].answer for i in range(4)]

    drawn, greedy = answers(), [answer for _, answer in alone[:4]]
    assert drawn == answers(order=(2, 0, 3, 1), others=2)
    assert drawn[1][: len(greedy[1])] == greedy[1], "greedy all the same"
    assert drawn[0] != greedy[0][:15]
    settings[0] = dataclasses.replace(settings[0], seed=9)
    assert answers()[0] != drawn[0]
    settings[0] = dataclasses.replace(settings[0], top_k=1)
    assert answers()[0] == greedy[0][:15]


def tiny_deepseek() -> DeepSeek:
    attention = MLAConfig(hidden_size=32, num_heads=2, qk_nope_head_dim=16, v_head_dim=16)
    config = DeepSeekConfig(64, 2, 1, 48, 24, 4, 2, 1, attention, context_length=64)
    model = DeepSeek(config, rngs=nnx.Rngs(0))
    graph, weights = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(lambda leaf: leaf * 4 if leaf.ndim > 1 else leaf, weights))


@pytest.mark.parametrize(
    "make",
    [
        lambda: tiny_llama(attention="mla"),
        tiny_deepseek,
        lambda: tiny_llama(
            config=dataclasses.replace(TINY, sliding_window=6, full_layers=(1,), qkv_bias=True, qk_norm=True)
        ),
    ],
    ids=["latent-gqa", "deepseek", "alternating windows"],
)
@pytest.mark.sweep(make=None)
def test_every_kind_of_decoder_is_served(make):
    model = make()
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8, 20]]
    expected = generate(model, prompts, max_new_tokens=8, page_size=4)
    engine = Engine(model, max_len=32, num_rows=2, page_size=4, step_tokens=5, num_pages=9)
    requests = [engine.submit(prompt, max_new_tokens=8) for prompt in prompts]
    run(engine)
    assert [request.answer for request in requests] == [expected.row(i) for i in range(3)]


@pytest.mark.parametrize("where", ["_run", "compile", "complete"])
def test_after_an_exception_the_next_step_makes_up_for_it(model, alone, where, monkeypatch):
    """Wherever in a step it came."""
    engine = Engine(model, **SIZES)
    (prompt, answer), other = alone[3], alone[-1]
    engine.submit(prompt, max_new_tokens=1)
    run(engine)
    requests = [engine.submit(tokens, max_new_tokens=len(right)) for tokens, right in (alone[3], other)]
    owner, name = (
        (engine._scheduler, where)
        if where == "complete"
        else (engine._runner, where.replace("compile", "_compile"))
    )
    if where == "compile":
        engine._runner.programs.clear()
    working, failed = getattr(owner, name), []

    def failing(*arguments, **more):
        if len(failed) < 3:
            failed.append(where)
            raise KeyboardInterrupt
        return working(*arguments, **more)

    monkeypatch.setattr(owner, name, failing)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    run(engine)
    assert requests[0].reused == 28
    assert requests[1].reused == 24
    assert [request.answer for request in requests] == [answer, other[1]]
    engine._scheduler.prefixes.clear()
    assert engine.free_pages == engine._scheduler.allocator.num_pages


def test_a_cache_that_was_given_away_and_lost_is_made_anew(model, alone):
    """An interrupt behind a program, before its results have a name."""
    engine = Engine(model, **SIZES)
    engine.compile()
    requests = [engine.submit(prompt, max_new_tokens=len(right)) for prompt, right in alone]
    working, calls = engine._runner.programs, []

    def losing(program):
        def call(*arguments):
            results = program(*arguments)
            calls.append(results[0])
            if len(calls) % 5 == 0:
                raise KeyboardInterrupt
            return results

        return call

    engine._runner.programs = {key: losing(program) for key, program in working.items()}
    lost = 0
    while engine.busy:
        cache = engine._runner.cache
        try:
            engine.step()
        except KeyboardInterrupt:
            lost += any(leaf.is_deleted() for leaf in jax.tree.leaves(cache))
    assert lost > 2
    assert [request.answer for request in requests] == [answer for _, answer in alone]
    check_pages(engine)


@pytest.mark.usefixtures("as_users_have_it")
def test_interrupts_at_lines_drawn_at_random(model, alone):
    """Many more of them, without a model, in test_interrupted_steps.py."""
    engine, rng = Engine(model, **{**SIZES, "num_pages": 24}), random.Random(0)
    engine.compile()
    with Interrupts(HOST) as interrupts:
        while interrupts.total < 50:
            requests = [engine.submit(prompt, max_new_tokens=len(right)) for prompt, right in alone]
            while engine.busy:
                interrupts.arm(after=rng.randrange(2000))
                with contextlib.suppress(KeyboardInterrupt):
                    engine.step()
                interrupts.disarm()
            assert [request.answer for request in requests] == [answer for _, answer in alone]
            check_pages(engine)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_len": 65}, ValueError, "argument 'max_len': expected at most 64, got 65"),
        ({"num_rows": 0}, ValueError, "argument 'num_rows': expected at least 1, got 0"),
        ({"burst": 1.5}, TypeError, "argument 'burst': expected an int, got 1.5 of type float"),
        (
            {"prefix_cache": "no"},
            TypeError,
            "argument 'prefix_cache': expected True or False, got 'no' of type str",
        ),
        ({"step_tokens": 3}, ValueError, "argument 'step_tokens': expected at least 4, got 3"),
        (
            {"stop_token_ids": "a"},
            TypeError,
            "argument 'stop_token_ids': expected a sequence of int token ids",
        ),
    ],
)
@pytest.mark.usefixtures("as_users_have_it")
def test_sizes_that_cannot_be_are_named(model, options, error, message):
    with pytest.raises(error, match=f"^Engine: {re.escape(message)}"):
        Engine(model, **{**SIZES, **options})


@pytest.mark.parametrize(
    ("options", "prompt", "changes", "error", "message"),
    [
        (
            {},
            [1] * 60,
            {"max_new_tokens": 5},
            ValueError,
            "argument 'prompt': expected with max_new_tokens together at most 64 tokens (a row of the block table), "
            "got 60 + 5",
        ),
        (
            {"num_pages": 5},
            [1] * 20,
            {"max_new_tokens": 2},
            ValueError,
            "argument 'prompt': expected with max_new_tokens together at most 21 tokens (a row of the block table), "
            "got 20 + 2",
        ),
        ({}, [], {}, ValueError, "argument 'prompt': expected at least one token, got none"),
        ({}, [97], {}, ValueError, "argument 'prompt': expected token ids in [0, 97), got 97"),
        ({}, [1], {"max_new_tokens": 0}, ValueError, "argument 'max_new_tokens': expected at least 1, got 0"),
        (
            {},
            [1],
            {"sampling": 0.5},
            TypeError,
            "argument 'sampling': expected a Sampling or None, got float",
        ),
    ],
)
@pytest.mark.usefixtures("as_users_have_it")
def test_requests_that_cannot_be_served_are_refused(model, options, prompt, changes, error, message):
    engine = Engine(model, **{**SIZES, **options})
    with pytest.raises(error, match=f"^Engine.submit: {re.escape(message)}"):
        engine.submit(prompt, **changes)
    assert not engine.busy
