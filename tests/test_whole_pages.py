"""Answers from a cache whose pages have scales: the same whatever runs beside a request, or ran before it."""

import jax.numpy as jnp
import numpy as np
import pytest
from models_support import TINY, tiny_llama

from pallas_attn.models import Engine, Sampling, scheduler

pytestmark = pytest.mark.once  # what it is made of is tested on both

LARGER = 48
PAGE, FEW_PAGES = 4, 24
NEW = 12


def uneven(factor: float):
    """Keys and values of tokens from LARGER on are so many times as large: what comes to a page with one is rounded by
    its scale."""
    model = tiny_llama(dtype=jnp.float32)
    half = TINY.hidden_size // 2
    small, large = jnp.split(model.embedding[...], [LARGER])
    model.embedding[...] = jnp.concatenate([small.at[:, half:].set(0), large.at[:, :half].set(0)])
    kernel, keys = model.layers.attention.qkv_proj.kernel, TINY.num_heads * TINY.head_dim
    kernel[...] = kernel[...].at[:, half:, keys:].multiply(factor)
    return model


def texts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    small, large = rng.integers(1, LARGER, (4, 30)), rng.integers(LARGER, TINY.vocab_size, (4, 30))
    return np.where(rng.random((4, 30)) < 0.2, large, small).tolist()


class Served:
    """An engine with few pages, and what it answers to one prompt among others."""

    def __init__(self, cache_dtype, factor: float):
        self.engine = Engine(
            uneven(factor),
            max_len=64,
            num_rows=4,
            page_size=PAGE,
            num_pages=FEW_PAGES,
            step_tokens=16,
            cache_dtype=cache_dtype,
        )
        self.first, *self.others = texts()
        self.first = self.first[:13]
        answer = self.request(self.first, NEW)
        self.run()
        self.prompt = [*self.first, *answer.answer, *self.others[0][:2]]

    def request(self, prompt, new, steps=0):
        request = self.engine.submit(prompt, max_new_tokens=new, sampling=Sampling(logprobs=0))
        for _ in range(steps):
            self.engine.step()
        return request

    def run(self) -> None:
        while self.engine.busy:
            self.engine.step()

    def answer(self, before=(), beside=()):
        """(the request, the log-probabilities of its answer); `before` and `beside`: (prompt, tokens of its answer)."""
        self.engine._scheduler.prefixes.clear()
        for prompt, new in before:
            self.request(prompt, new)
            self.run()
        for prompt, new in beside:
            self.request(prompt, new, steps=1)
        mine = self.request(self.prompt, NEW)
        self.run()
        return mine, [token.logprob for token in mine.logprobs]


def everything(served: Served) -> dict:
    a, b, c = served.others
    alone = served.answer()
    answer = alone[0].answer
    return {
        "alone": alone,
        "beside others": served.answer(beside=[(a[:13], 8), (b[:7], 8)]),
        "behind the same beginning": served.answer(before=[([*served.prompt[:18], *c[:9]], 1)]),
        "a further turn": served.answer(before=[(served.first, NEW)]),
        "sent back": served.answer(beside=[(a, 30), (b, 30), (c, 20)]),
        "sent back, its answer known": served.answer(
            before=[([*served.prompt, *answer, 1], 1)], beside=[(a, 30), (b, 30), (c, 20)]
        ),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cache_dtype", "factor"), [("int8", 30), ("float8_e4m3fn", 1e6), ("float8_e5m2", 1e9)]
)
def test_answers_are_the_same(cache_dtype, factor):
    found = everything(Served(cache_dtype, factor))
    assert found["sent back"][0].preempted
    assert found["behind the same beginning"][0].reused == 16
    assert found["a further turn"][0].reused == 12, "of an answer no page is shared"
    for case, (request, logprobs) in found.items():
        assert request.answer == found["alone"][0].answer, case
        np.testing.assert_allclose(logprobs, found["alone"][1], atol=1e-5, err_msg=case)


def test_without_whole_pages_they_would_not_be(monkeypatch):
    """A control: what a request has computed of a page when others take the rest of a step shows in its answer."""
    served = Served("int8", 30)
    served.engine._scheduler.whole_pages = False
    found = everything(served)
    alone = found.pop("alone")[1]
    others = {case: np.abs(np.subtract(logprobs, alone)).max() for case, (_, logprobs) in found.items()}
    assert min(others["beside others"], others["sent back"], others["a further turn"]) > 1e-4, others


def test_a_step_must_hold_a_page():
    sizes = dict(num_rows=2, step_tokens=3, page_size=4)
    with pytest.raises(ValueError, match="Engine: argument 'step_tokens': expected at least 4, got 3"):
        Engine(tiny_llama(), **sizes, cache_dtype="int8")
    Engine(tiny_llama(), **sizes)
    with pytest.raises(ValueError, match="Scheduler: argument 'step_tokens': expected at least 4, got 3"):
        scheduler.Scheduler(num_pages=4, **sizes, whole_pages=True)
