"""Continuous batching: requests join and leave a running batch at any step.

The scheduler (scheduler.py) decides on the host which tokens of which requests a step computes and in which pages they
lie; the runner (runner.py) runs it on the device: chunks of prompts mixed with tokens of answers or, when no prompt is
being read, up to `burst` tokens of every answer. The host reads the chosen tokens once a step. The engine adds the
rest: one step at a time, whatever the threads, ending requests, and recovery from failed steps.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from pallas_attn import PagedKVCache
from pallas_attn._call.checks import ArgumentChecker, check_int, fail

from .arguments import check_model, checked_prompt
from .llama import for_lengths, invariant
from .requests import Request
from .runner import Runner
from .sampling import How, Sampling, checked_stops, token_logprobs
from .scheduler import Scheduler, Step
from .stats import EngineStats
from .steps import Decoder
from .stopping import first_stop

# A step that fails this many times in a row will keep failing.
_TRIES = 3


class Engine:
    """Serves requests with a model, many at a time.

        engine = Engine(model, max_len=2048, stop_token_ids=tokenizer.stop_token_ids)
        requests = [engine.submit(prompt, max_new_tokens=256) for prompt in prompts]
        while engine.busy:
            for request, tokens in engine.step().items():
                ...  # new tokens of this request; request.done says whether they are its last

    or, for one of them while the others go on, `for token in engine.stream(request)`.

    Greedy answers are those of `generate`. Equal prefixes of requests share full pages, also with requests that have
    ended. When pages run out, the newest request goes back into the queue and loses nothing (see `Scheduler`).

    Any thread may use it. `submit`, `cancel`, `stats` and `busy` never wait for a step: what comes while one is made is
    heeded by the next. Steps are made one at a time: `step` and `stream` wait for one that another thread is making, in
    no order. Where tokens must not come in lumps, let one thread make all the steps.

    An exception may come out of a step at any line, Ctrl-C for one. No page and no request is lost: the next step makes
    up for what that one did not do. (Tokens that it had chosen already may stand in `answer` alone, and not in what the
    next one returns.) When steps fail three times in a row, other than by an interrupt, the requests that run end with
    `finish_reason` "error".

    Args:
        model: a `Llama` or a `DeepSeek`; of `load_gguf` and `load_checkpoint` their ``.model``.
        max_len: most tokens of a request, prompt and answer together; None: the model's context.
        num_rows: requests that run at once.
        num_pages: pages of the cache per layer; None: enough for `num_rows` requests of `max_len` tokens.
        page_size: tokens per page.
        step_tokens: most tokens of a mixed step, at least `num_rows`, and `page_size` with an 8-bit cache: a long
            prompt takes several steps.
        burst: most tokens of an answer in a step in which no prompt is read.
        prefix_cache: whether equal prefixes share full pages.
        cache_dtype: of the cache, as in `generate`; None: the model's. An 8-bit cache has scales of each page, which
            grow with what it holds. There prompts are read by whole pages, answers are shared with nobody, and those
            of a request that was sent back are computed again token by token: so answers do not depend on what is
            served beside a request, or was before.
        stop_token_ids: tokens that end an answer.
        tokenizer: of the model, for requests with stop texts; anything with `decode`.
        batch_invariant: the scores that a request's tokens are chosen from, and so its tokens, have the same bits
            whatever runs beside it, in whichever row and chunks it runs, however often it is sent back, and whether or
            not it finds pages of an equal prefix; also in another engine of the same sizes in the same process. A
            model that was made with it is served so anyway. For that, one program of `step_tokens` tokens
            computes every step, however few there are; there is no `burst`; attention of prompts reads keys and values
            for each of their tokens (`PagedAttention`); and the scales of an fp8 cache are 1. A `step_tokens` no larger
            than the GPU computes in the time that it takes to read the weights, 64 to 256, costs decoding least. With
            implementations "pallas", "triton" and "interpret" in any dtype that they serve, of a `Llama` and of a
            `DeepSeek` without indexers. It builds on one thing that is XLA's to keep: that a compiled program rounds a
            row alike wherever among the others it stands. Tests look at it on GPUs. On CPUs ("interpret", to debug)
            some products round the last of their rows otherwise, and nothing is promised.

    Attributes:
        steps: made so far.
        scores: None; with `batch_invariant`, of a dict that is put here each request gets a list of what its tokens
            were chosen from, [vocab_size] float32 each, before penalties. One that was cancelled may have one more
            than tokens.

    Raises:
        TypeError: the model is none that this can run, or an argument of another type than said above.
        ValueError: an argument out of its range.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        max_len: int | None = None,
        num_rows: int = 16,
        num_pages: int | None = None,
        page_size: int = 16,
        step_tokens: int = 256,
        burst: int = 8,
        prefix_cache: bool = True,
        cache_dtype: Any = None,
        stop_token_ids: Sequence[int] = (),
        tokenizer: Any = None,
        batch_invariant: bool = False,
    ):
        check_model("Engine", model)
        context = model.config.context_length
        max_len = context if max_len is None else max_len
        check_int("Engine", "max_len", max_len, least=2, most=context)
        for name, size in (("num_rows", num_rows), ("page_size", page_size), ("burst", burst)):
            check_int("Engine", name, size, least=1)
        check_int("Engine", "step_tokens", step_tokens, least=num_rows)
        num_pages = num_rows * -(-max_len // page_size) if num_pages is None else num_pages
        check_int("Engine", "num_pages", num_pages, least=1)
        for name, flag in (("prefix_cache", prefix_cache), ("batch_invariant", batch_invariant)):
            ArgumentChecker("Engine").flag(name, flag)
        self._invariant = bool(batch_invariant or getattr(model, "batch_invariant", False))
        model = invariant("Engine", model) if self._invariant else model
        self._stops = checked_stops("Engine", stop_token_ids, model.config.vocab_size)
        self._tokenizer = tokenizer
        model = for_lengths(model, max_len)
        self._model, self._most = model, min(max_len, num_pages * page_size + 1)
        burst = 1 if self._invariant else burst
        self._runner = Runner(
            model,
            num_rows=num_rows,
            max_len=max_len,
            num_pages=num_pages,
            page_size=page_size,
            step_tokens=step_tokens,
            burst=burst,
            stops=self._stops,
            batch_invariant=self._invariant,
            cache_dtype=cache_dtype,
        )
        cache = self._runner.cache
        whole_pages = isinstance(cache, PagedKVCache) and cache.scale_per_page
        if whole_pages:
            check_int("Engine", "step_tokens", step_tokens, least=page_size)
        self._scheduler = Scheduler(
            num_pages=num_pages,
            page_size=page_size,
            num_rows=num_rows,
            step_tokens=step_tokens,
            burst=burst,
            prefix_cache=prefix_cache,
            whole_pages=whole_pages,
            stopped=self._text_stops,
        )
        self.scores: dict[Request, list[np.ndarray]] | None = None
        self._one_at_a_time = threading.RLock()
        # Whether a step is running, or was interrupted and not yet recovered.
        self._under_way = False
        self._failures = 0
        self.steps = 0

    @property
    def compile_seconds(self) -> float:
        """Seconds spent compiling so far."""
        return self._runner.compile_seconds

    @property
    def busy(self) -> bool:
        """Whether a step has something to do: a request runs or waits, or a step was interrupted."""
        return self._under_way or self._scheduler.busy

    @property
    def max_len(self) -> int:
        """Most tokens of a request, prompt and answer together."""
        return self._most

    @property
    def free_pages(self) -> int:
        """Pages held neither by a request nor by the prefix cache."""
        return self._scheduler.free_pages

    def stats(self) -> EngineStats:
        """Current statistics; during a step, anything between before and after."""
        scheduler, totals = self._scheduler, self._scheduler.totals
        return EngineStats(
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            pages=scheduler.allocator.num_pages,
            free_pages=scheduler.free_pages,
            cached_pages=0 if scheduler.prefixes is None else scheduler.prefixes.num_pages,
            steps=self.steps,
            compile_seconds=self.compile_seconds,
            **totals._asdict(),
        )

    def submit(
        self, prompt: Sequence[int], *, max_new_tokens: int = 64, sampling: Sampling | None = None
    ) -> Request:
        """A request, which joins as soon as there is room: its `answer` grows and `done` becomes true.

        Args:
            prompt: token ids in ``[0, vocab_size)``, at least one: a list or an integer array.
            max_new_tokens: most new tokens, at least 1.
            sampling: how they are chosen, and what else ends them; None takes the most likely ones. For several answers
                see `submit_all`.

        Raises:
            TypeError: an argument of another type.
            ValueError: one out of its range, or a request longer than a row of the block table or all pages.
        """
        check_int("Engine.submit", "max_new_tokens", max_new_tokens, least=1)
        if not isinstance(sampling, Sampling | None):
            fail("Engine.submit", "sampling", "a Sampling or None", type(sampling).__name__, TypeError)
        sampling = sampling or Sampling()
        if sampling.n > 1:
            fail("Engine.submit", "sampling.n", "1 (submit_all gives several answers)", str(sampling.n))
        if sampling.stop and self._tokenizer is None:
            fail("Engine.submit", "sampling.stop", "none in an Engine without tokenizer", str(sampling.stop))
        vocab_size = self._model.config.vocab_size
        own = checked_stops("Engine.submit", sampling.stop_token_ids, vocab_size, "sampling.stop_token_ids")
        prompt = checked_prompt("Engine.submit", "prompt", prompt, vocab_size)
        if len(prompt) + max_new_tokens > self._most:
            expected = f"with max_new_tokens together at most {self._most} tokens (a row of the block table)"
            fail("Engine.submit", "prompt", expected, f"{len(prompt)} + {max_new_tokens}")
        return self._scheduler.submit(prompt, max_new_tokens, (*self._stops, *own), sampling)

    def submit_all(
        self, prompt: Sequence[int], *, max_new_tokens: int = 64, sampling: Sampling | None = None
    ) -> list[Request]:
        """`submit` for each of the `sampling.n` answers, with a seed of its own; they share the prompt's pages."""
        answers = (sampling or Sampling()).answers()
        return [self.submit(prompt, max_new_tokens=max_new_tokens, sampling=each) for each in answers]

    def cancel(self, request: Request) -> None:
        """Ends a request, whatever it is about; its answer so far stays. One that has ended stays as it is. If another
        thread makes a step just now, the answer may still get what that has chosen."""
        self._scheduler.cancel(request)

    def step(self) -> dict[Request, list[int]]:
        """Computes one step. The new tokens of each request that got some; nothing happens if none is left.

        After an exception in it, Ctrl-C for one, the next step makes up for what this one did not do.
        """
        with self._one_at_a_time:
            try:
                if self._under_way:
                    self._restore()
                self._under_way = True
                tokens = self._step()
                self._failures, self._under_way = 0, False
                return tokens
            except Exception as error:
                self._failed(error)
                raise

    def _step(self) -> dict[Request, list[int]]:
        step = self._scheduler.next_step()
        if not step.chunks:
            return {}
        results = self._runner.run(step)
        # Waits for the device only once there is nothing else to do.
        self._scheduler.begin(step)
        by_row, logs = np.asarray(results.tokens).T.tolist(), jax.tree.map(np.asarray, results.logprobs)
        tokens, logprobs = {}, {}
        for chunk in step.chunks:
            if chunk.answers:
                request = chunk.request
                new = [token for token in by_row[chunk.row] if token >= 0]
                tokens[request] = new[: self._stop_among(request, request.answer, new)]
                if (most := request.sampling.logprobs) is not None:
                    places = [(index, chunk.row) for index in range(len(tokens[request]))]
                    logprobs[request] = [token_logprobs(logs, place, most) for place in places]
        self._keep_scores(step, results.scores)
        answered = self._scheduler.complete(step, tokens, logprobs)
        self.steps += 1
        return {request: tokens[request] for request in answered}

    def _keep_scores(self, step: Step, scores: Any) -> None:
        """Before answers grow: after an interrupt the next step overwrites entries that belong to no answer."""
        if self.scores is None or scores is None:
            return
        scores = np.asarray(scores)
        for chunk in step.chunks:
            if chunk.answers:
                kept = self.scores.setdefault(chunk.request, [])
                kept[len(chunk.request.answer) :] = [scores[chunk.row].copy()]

    def _restore(self) -> None:
        """After an interrupted step: the host's state is rebuilt from what the scheduler knows to be true; the device's
        is as far as the step got, or lost."""
        self._runner.create_rows()
        if self._runner.lost_cache():
            # In this order: the lost cache is replaced only once nobody relies on it.
            self._scheduler.forget()
            self._runner.create_cache()
        self._scheduler.restore()

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        if self._failures == _TRIES:
            self._failures = 0
            for request in self._scheduler.running or self._scheduler.waiting:
                request.end("error", _one_line(error))

    def _stop_among(self, request: Request, before: Sequence[int], new: Sequence[int]) -> int | None:
        """The number of new tokens up to the one that completes a stop text; None if none does. A request whose tokens
        cannot be decoded ends."""
        if not request.sampling.stop:
            return None
        try:
            return first_stop(self._tokenizer.decode, before, new, request.sampling.stop)
        except Exception as error:
            request.end("error", _one_line(error))
            return None

    def _text_stops(self, request: Request) -> bool:
        return self._stop_among(request, request.answer[:-1], request.answer[-1:]) is not None

    def stream(self, request: Request, stop: Callable[[], bool] = lambda: False) -> Iterator[int]:
        """The tokens of a request's answer, as they come; other requests go on meanwhile. Leaving the loop early
        cancels the request, and so does `stop`, which is asked before each step, when it returns true.

        Raises RuntimeError when the request ends with an error.
        """
        given = 0
        try:
            while True:
                done = request.done  # checked first: another thread may be making steps
                yield from request.answer[given : (given := len(request.answer))]
                if request.finish_reason == "error":
                    raise RuntimeError(f"Engine.stream: {request.error}")
                if done or stop():
                    return
                self.step()
        finally:
            self.cancel(request)

    def compile(self, sampling: Sampling | None = None) -> None:
        """Compiles all programs for such samplings now, in parallel, rather than when requests need them."""
        how = How.of([] if sampling is None else [sampling])
        with self._one_at_a_time:
            self._runner.compile(how)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()):.200}".removesuffix(": ")
