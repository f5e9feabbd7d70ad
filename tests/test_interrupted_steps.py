"""Ctrl-C at any line of a step, and whatever else goes wrong in one: every request has its tokens all the same, or says
that it has not, no page is lost and nothing is counted twice."""

import contextlib
import itertools
import random

import pytest
from engine_support import HOST, STOP, Interrupts, check_pages, engine_of, logprob_of, scores_of, whole_answer

from pallas_attn.models import Engine, Sampling
from pallas_attn.models.prefix_cache import PrefixCache
from pallas_attn.models.requests import Request
from pallas_attn.models.scheduler import Scheduler
from pallas_attn.ops.kv_cache.allocator import PageAllocator

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("as_users_have_it")]  # no program is compiled

SIZES = [
    dict(num_pages=16),
    dict(num_pages=18, num_rows=4, step_tokens=5, burst=4),
    dict(num_pages=17, page_size=4, burst=1),
    dict(num_pages=16, prefix_cache=False),
    dict(num_rows=2, step_tokens=32, burst=8),
    dict(num_pages=16, batch_invariant=True),
]


class History:
    """Requests that come and are cancelled at random, while steps are interrupted."""

    def __init__(self, seed: int, interrupts: Interrupts, device_fails: bool = True):
        self.rng = rng = random.Random(seed)
        self.interrupts, self.device_fails = interrupts, device_fails
        self.engine = engine_of(self._device, **SIZES[seed % len(SIZES)])
        self.engine.scores = {}
        self.requests, self.cancelled = [], set()
        self.texts = {}
        self._rate = rng.choice([0.3, 0.7, 0.95])
        self._failed = False

    def _device(self) -> str | None:
        if self.rng.random() < 0.02:  # while the step is made
            self._cancel()
        if not self.device_fails or self.rng.random() > 0.05:
            return None
        return self.rng.choice(["before", "after", ""])

    def _submit(self) -> None:
        rng = self.rng
        prompt = [rng.randint(1, 2) for _ in range(rng.randint(1, 20))]
        if self.requests and rng.random() < 0.5:  # a further turn of an earlier one
            prompt = [*rng.choice(self.requests).tokens[:24], *prompt[:4]]
        sampling = Sampling(stop="55" if rng.random() < 0.3 else (), logprobs=rng.choice([None, 1]))
        request = self.engine.submit(prompt, max_new_tokens=rng.randint(1, 14), sampling=sampling)
        self.requests.append(request)

    def _cancel(self) -> None:
        request = self.rng.choice(self.requests)
        try:
            self.engine.cancel(request)
        finally:
            if request.finish_reason == "cancelled":
                self.cancelled.add(request)

    def _step(self) -> None:
        interrupts, rng = self.interrupts, self.rng
        if rng.random() < self._rate:
            # Most lines that are run are those of loops, and rare ones matter as much.
            if rng.random() < 0.5 and interrupts.seen:
                places = interrupts.seen - interrupts.hit or interrupts.seen
                interrupts.arm(place=rng.choice(sorted(places)))
            else:
                interrupts.arm(after=rng.randrange(400 if rng.random() < 0.7 else 4000))
        try:
            self.engine.step()
        except KeyboardInterrupt:
            pass
        except RuntimeError:
            assert self.device_fails
        finally:
            interrupts.disarm()

    def run(self, num_requests: int = 12) -> None:
        rng = self.rng
        while len(self.requests) < num_requests:
            if rng.random() < 0.4:
                self._submit()
            elif rng.random() < 0.1 and self.requests:
                self._cancel()
            self._step()
        for _ in range(3000):
            if not self.engine.busy:
                break
            self._step()
        self.engine.step()  # which is not interrupted
        self.check()

    def check(self) -> None:
        assert not self.engine.busy, "no end"
        for request in self.requests:
            stop = "".join(request.sampling.stop)
            whole = whole_answer(request.prompt, request.max_new_tokens, text=stop)
            if request.finish_reason == "error":
                assert self.device_fails
                assert request.error == "LostError"
            elif request in self.cancelled:
                assert request.finish_reason == "cancelled"
            else:
                ended = whole[-1] == STOP or (stop and stop in "".join(map(str, whole)))
                assert request.finish_reason == ("stop" if ended else "length")
                assert request.answer == whole
            assert request.answer == whole[: len(request.answer)]
            tokens = request.tokens
            logprobs = [logprob_of(tokens[:at]) for at in range(len(request.prompt), request.length)]
            if request.sampling.logprobs is None:
                logprobs = []
            assert [each.logprob for each in request.logprobs] == logprobs
            self.check_scores(request)
        check_pages(self.engine)
        stats = self.engine.stats()
        assert (stats.waiting, stats.running) == (0, 0)
        assert stats.free_pages + stats.cached_pages == stats.pages
        reasons = [request.finish_reason for request in self.requests]
        assert stats.finished == {reason: reasons.count(reason) for reason in stats.finished}
        assert stats.generated_tokens == sum(len(request.answer) for request in self.requests)
        joined = [request for request in self.requests if request.place.cached_tokens is not None]
        assert stats.prompt_tokens == sum(len(request.prompt) for request in joined)
        assert stats.cached_tokens == sum(request.cached_tokens for request in joined)
        assert stats.preemptions == sum(request.preempted for request in joined)

    def check_scores(self, request: Request) -> None:
        """One for each token of an answer; of a step that was given up, before the request was, there may be more."""
        kept, tokens = self.engine.scores.get(request, []), request.answer
        if self.engine._invariant:
            assert 0 <= len(kept) - len(tokens) <= (request.finish_reason in ("cancelled", "error"))
        else:
            assert not kept
        for at, scores in enumerate(kept[: len(tokens)]):
            assert scores.tolist() == scores_of([*request.prompt, *tokens[:at]]).tolist()


@pytest.mark.parametrize(
    ("instructions", "times"), [(False, 3000), (True, 1500)], ids=["lines", "instructions"]
)
@pytest.mark.slow
def test_steps_that_are_interrupted_anywhere_are_made_up_for(instructions, times):
    with Interrupts(HOST, instructions) as interrupts:
        for seed in itertools.count():
            if interrupts.total >= times:
                break
            try:
                History(seed, interrupts).run()
            except BaseException as error:
                raise AssertionError(f"history {seed}") from error
    missed = interrupts.seen - interrupts.hit
    if not instructions:
        assert len(missed) < 0.03 * len(interrupts.seen), sorted(missed)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Engine, "_restore"),
        (Scheduler, "restore"),
        (Scheduler, "forget"),
        (PrefixCache, "restore"),
        (PageAllocator, "restore"),
    ],
)
@pytest.mark.control
def test_without_any_part_of_it_something_is_lost(owner, name, monkeypatch):
    monkeypatch.setattr(owner, name, lambda *_: None)

    def histories() -> None:
        for seed in range(100):
            History(seed, interrupts).run()

    with Interrupts(HOST) as interrupts, pytest.raises((AssertionError, ValueError, LookupError)):
        histories()


def test_interrupted_arrivals_are_there_as_a_whole_or_not_at_all():
    """And those that were to be cancelled go on or are."""
    rng = random.Random(0)
    with Interrupts(HOST) as interrupts:
        engine = engine_of()
        for _ in range(300):
            interrupts.arm(after=rng.randrange(60))
            with contextlib.suppress(KeyboardInterrupt):
                request = engine.submit([1, 2, 1], max_new_tokens=3)
                engine.cancel(request)
            interrupts.disarm()
        before = engine.stats()
        while engine.busy:
            engine.step()
    stats = engine.stats()
    assert before.waiting == stats.finished["stop"] + stats.finished["length"] > 10
    assert stats.finished["cancelled"] > 30
    assert stats.generated_tokens == before.waiting * len(whole_answer([1, 2, 1], 3))
    check_pages(engine)


def test_a_request_whose_text_cannot_be_read_ends_alone():
    engine = engine_of()

    def decode(tokens):
        raise UnicodeError("no\ntext")

    engine._tokenizer.decode = decode
    other = engine.submit([2, 1], max_new_tokens=9)
    request = engine.submit([1, 2], max_new_tokens=9, sampling=Sampling(stop="x"))
    while engine.busy:
        engine.step()
    assert request.done
    assert (request.finish_reason, request.error, request.answer) == ("error", "UnicodeError: no text", [])
    assert other.answer == whole_answer([2, 1], 9)
    check_pages(engine)
    with pytest.raises(RuntimeError, match=r"Engine.stream: UnicodeError: no text"):
        list(engine.stream(engine.submit([1], max_new_tokens=9, sampling=Sampling(stop="x"))))


def test_what_fails_again_and_again_ends():
    engine = engine_of(lambda: "")
    requests = [engine.submit([1, 2, at], max_new_tokens=9) for at in range(5)]
    failures = 0
    while engine.busy:
        try:
            engine.step()
        except RuntimeError:
            failures += 1
    assert [request.finish_reason for request in requests] == ["error"] * 5
    assert failures == 3 + 3, "three requests run at a time"
    engine._runner.programs.fails = lambda: None
    last = engine.submit([1, 2], max_new_tokens=9)
    while engine.busy:
        engine.step()
    assert last.answer == whole_answer([1, 2], 9)
    check_pages(engine)
