"""Continuous batching: requests join and leave a running batch at any step.

The scheduler (scheduler.py) says on the host which tokens of which requests a step computes and in which pages they
lie. A step is a program of static shape, compiled once: the mixed one computes up to `step_tokens` tokens, chunks of
prompts among tokens of answers, in the ragged form of the attention modules; a smaller one does the same for steps
with few tokens; the last, when no prompt is read, goes on for up to `burst` tokens of every answer, each chosen on the
device. The host reads what was chosen once a step; keys and values stay where they are.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call.checks import ArgumentChecker, check_int, fail
from pallas_attn._call.optional import needs_extra

with needs_extra("models", user="pallas_attn.models.engine"):
    from flax import nnx

from . import steps
from .arguments import check_model, checked_prompt
from .llama import for_lengths, invariant
from .sampling import How, Rows, Sampling, checked_stops, token_logprobs
from .scheduler import Request, Scheduler, Step
from .steps import Decoder
from .stopping import first_stop

# A step whose tokens fit in this part of `step_tokens` is padded to that and no further, unless it is too small to be
# worth a program of its own: a turn of a chat takes no longer than it must.
_FEW = 8
_WORTH_COMPILING = 32


class Engine:
    """Serves requests with a model, many at a time.

        engine = Engine(model, max_len=2048, stop_token_ids=tokenizer.stop_token_ids)
        requests = [engine.submit(prompt, max_new_tokens=256) for prompt in prompts]
        while engine.busy:
            for request, tokens in engine.step().items():
                ...  # new tokens of this request; request.done says whether they are its last

    or, for one of them while the others go on, `for token in engine.stream(request)`.

    Greedy answers are those of `generate`. Equal prefixes of requests share full pages, also with requests that have
    ended. When pages run out, the newest request goes back into the queue and loses nothing (see `Scheduler`). Not for
    several threads at once.

    Args:
        model: a `Llama` or a `DeepSeek`; of `load_gguf` and `load_checkpoint` their ``.model``.
        max_len: most tokens of a request, prompt and answer together; None: the model's context.
        num_rows: requests that run at once.
        num_pages: pages of the cache per layer; None: enough for `num_rows` requests of `max_len` tokens.
        page_size: tokens per page.
        step_tokens: most tokens of a mixed step, at least `num_rows`: a long prompt takes several steps.
        burst: most tokens of an answer in a step in which no prompt is read.
        prefix_cache: whether equal prefixes share full pages.
        cache_dtype: of the cache, as in `generate`; None: the model's. An 8-bit cache has scales of each page, which
            grow with what it holds: what a request finds does not depend on those that were served before.
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
        compile_seconds: spent compiling so far.
        scores: None; with `batch_invariant`, of a dict that is put here each request gets a list of what its tokens
            were chosen from, [vocab_size] float32 each, before penalties.

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
        pages_each = -(-max_len // page_size)
        num_pages = num_rows * pages_each if num_pages is None else num_pages
        check_int("Engine", "num_pages", num_pages, least=1)
        for name, flag in (("prefix_cache", prefix_cache), ("batch_invariant", batch_invariant)):
            ArgumentChecker("Engine").flag(name, flag)
        self._invariant = bool(batch_invariant or getattr(model, "batch_invariant", False))
        model = invariant("Engine", model) if self._invariant else model
        self._stops, self._tokenizer = checked_stops("Engine", stop_token_ids), tokenizer
        model = for_lengths(model, max_len)
        self._model, self._most = model, min(max_len, num_pages * page_size + 1)
        self._scheduler = Scheduler(
            num_pages=num_pages,
            page_size=page_size,
            num_rows=num_rows,
            step_tokens=step_tokens,
            burst=1 if self._invariant else burst,
            prefix_cache=prefix_cache,
        )
        few = step_tokens // _FEW
        few_as_well = few >= max(num_rows, _WORTH_COMPILING) and not self._invariant
        self._rooms = [few, step_tokens] if few_as_well else [step_tokens]
        self._graph, self._weights = nnx.split(model)
        self._tables = np.full((num_rows, pages_each), -1, np.int32)
        tables = jnp.asarray(self._tables)
        self._cache = model.create_cache(
            num_pages=num_pages, page_size=page_size, block_tables=tables, dtype=cache_dtype
        )
        self._rows = Rows.greedy(num_rows)
        lengths = np.zeros(num_rows, np.int32)
        self._texts = steps.Texts(np.full((num_rows, max_len), -1, np.int32), lengths)
        self._held: list[tuple[Request, list[int]] | None] = [None] * num_rows
        self._sampling: dict[Request, Sampling] = {}
        self._programs: dict[Any, Callable[..., Any]] = {}
        self.scores: dict[Request, list[np.ndarray]] | None = None
        self._logits: Any = None  # of the last step
        self._choices: set[How] = set()  # that are compiled
        self.steps, self.compile_seconds = 0, 0.0

    @property
    def busy(self) -> bool:
        """Whether a request runs or waits."""
        return self._scheduler.busy

    @property
    def free_pages(self) -> int:
        """Pages that neither a request nor the prefix cache holds."""
        return self._scheduler.allocator.num_free

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
            TypeError: an argument of another type. ValueError: one out of its range, or a request longer than a row of
                the block table or all pages.
        """
        check_int("Engine.submit", "max_new_tokens", max_new_tokens, least=1)
        if not isinstance(sampling, Sampling | None):
            fail("Engine.submit", "sampling", "a Sampling or None", type(sampling).__name__, TypeError)
        sampling = sampling or Sampling()
        if sampling.n > 1:
            fail("Engine.submit", "sampling.n", "1 (submit_all gives several answers)", str(sampling.n))
        if sampling.stop and self._tokenizer is None:
            fail("Engine.submit", "sampling.stop", "none in an Engine without tokenizer", str(sampling.stop))
        prompt = checked_prompt("Engine.submit", "prompt", prompt, self._model.config.vocab_size)
        if len(prompt) + max_new_tokens > self._most:
            expected = f"with max_new_tokens together at most {self._most} tokens (a row of the block table)"
            fail("Engine.submit", "prompt", expected, f"{len(prompt)} + {max_new_tokens}")
        stops = (*self._stops, *sampling.stop_token_ids)
        request = self._scheduler.submit(prompt, max_new_tokens, stops)
        self._sampling[request] = sampling
        return request

    def submit_all(
        self, prompt: Sequence[int], *, max_new_tokens: int = 64, sampling: Sampling | None = None
    ) -> list[Request]:
        """`submit` for each of the `sampling.n` answers, with a seed of its own; they share the prompt's pages."""
        answers = (sampling or Sampling()).answers()
        return [self.submit(prompt, max_new_tokens=max_new_tokens, sampling=each) for each in answers]

    def cancel(self, request: Request) -> None:
        """Ends a request, whatever it is about; its answer so far stays. One that has ended stays as it is."""
        self._scheduler.cancel(request)
        self._sampling.pop(request, None)

    def step(self) -> dict[Request, list[int]]:
        """Computes one step. The new tokens of each request that got some; nothing happens if none is left.

        After an exception in it, Ctrl-C for one, the next step makes up for what this one did not do.
        """
        step = self._scheduler.next_step()
        if not step.chunks:
            return {}
        self.steps += 1
        for chunk in step.chunks:
            self._fill_row(chunk.row, chunk.request)
        as_prompts = step.reads_prompts or self._invariant
        chosen, logs = self._mixed(step) if as_prompts else self._decode(step)
        # The device is not waited for before there is nothing else to do.
        self._scheduler.begin(step)
        by_row, logs = np.asarray(chosen).T.tolist(), jax.tree.map(np.asarray, logs)
        tokens, by_text = {}, []
        for chunk in step.chunks:
            if chunk.answers:
                new = [token for token in by_row[chunk.row] if token >= 0]
                tokens[chunk.request] = self._to_stop_text(chunk.request, new, by_text)
        rows = {chunk.request: chunk.row for chunk in step.chunks}
        for request in self._scheduler.complete(step, tokens):
            self._keep_logprobs(request, len(tokens[request]), logs, rows[request])
            if request in by_text:
                self._scheduler.cancel(request)
            if request.done:
                del self._sampling[request]
        return tokens

    def _to_stop_text(self, request: Request, new: list[int], ended: list[Request]) -> list[int]:
        """The new tokens up to the one that completes a stop text; the request is then one of `ended`."""
        sampling = self._sampling.get(request)
        if sampling is None or not sampling.stop:
            return new
        count = first_stop(self._tokenizer.decode, request.answer, new, sampling.stop)
        if count is None:
            return new
        ended.append(request)
        return new[:count]

    def _keep_logprobs(self, request: Request, count: int, logs: Any, row: int) -> None:
        if self.scores is not None and count:
            self.scores.setdefault(request, []).append(np.asarray(self._logits[row]))
        if (most := self._sampling[request].logprobs) is not None:
            request.logprobs += [token_logprobs(logs, (index, row), most) for index in range(count)]

    def stream(self, request: Request, stop: Callable[[], bool] = lambda: False) -> Iterator[int]:
        """The tokens of a request's answer, as they come; other requests go on meanwhile. Leaving the loop early
        cancels the request, and so does `stop`, which is asked before each step, when it returns true."""
        given = 0
        try:
            while True:
                yield from request.answer[given : (given := len(request.answer))]
                if request.done or stop():
                    return
                self.step()
        finally:
            self.cancel(request)

    def compile(self, sampling: Sampling | None = None) -> None:
        """Compiles all programs now, side by side, rather than when requests of such a sampling need them."""
        how = How.of([] if sampling is None else [sampling])
        if self._invariant:
            tokens = self._no_tokens(*self._rooms)
            self._compile([(steps.scores, tokens)], How())
            scores = jnp.zeros((len(self._tables), self._model.config.vocab_size), jnp.float32)
            self._choose(how, scores, *tokens[1:])
            return
        programs = [
            (steps.decode, self._no_rows()),
            *((steps.mixed, self._no_tokens(room)) for room in self._rooms),
        ]
        self._compile(programs, how)

    def _fill_row(self, row: int, request: Request) -> None:
        """A row changes when another request takes it, and when its request gets other pages."""
        if self._held[row] != (request, request.pages):
            self._tables[row, : len(request.pages)] = request.pages
            self._rows.fill(row, self._sampling[request])
            self._held[row] = request, list(request.pages)
        if self._sampling[request].penalised:
            self._texts.tokens[row] = -1
            self._texts.tokens[row, : request.length] = request.tokens
            self._texts.prompt_lengths[row] = len(request.prompt)

    def _no_tokens(self, room: int) -> tuple[np.ndarray, ...]:
        """Tokens, positions and bounds of a mixed step without any."""
        bounds = np.zeros(len(self._tables) + 1, np.int32)
        return np.zeros(room, np.int32), np.full(room, -1, np.int32), bounds

    def _no_rows(self) -> tuple[np.ndarray, ...]:
        """Tokens, positions and how many to choose, of a step of answers without any."""
        rows = len(self._tables)
        return np.zeros(rows, np.int32), np.full(rows, -1, np.int32), np.zeros(rows, np.int32)

    def _mixed(self, step: Step) -> tuple[jax.Array, Any]:
        count, at = sum(chunk.count for chunk in step.chunks), 0
        tokens, positions, bounds = self._no_tokens(next(room for room in self._rooms if count <= room))
        for chunk in sorted(step.chunks, key=lambda chunk: chunk.row):
            end = chunk.start + chunk.count
            tokens[at : at + chunk.count] = chunk.request.between(chunk.start, end)
            positions[at : at + chunk.count] = range(chunk.start, end)
            at += chunk.count
            bounds[chunk.row + 1] = chunk.count
        bounds = bounds.cumsum(dtype=np.int32)
        if not self._invariant:
            return self._run(steps.mixed, self._how(step), tokens, positions, bounds)
        self._logits, _ = self._run(steps.scores, How(), tokens, positions, bounds)
        return self._apart(step, positions, bounds)

    def _apart(self, step: Step, *places: np.ndarray) -> tuple[jax.Array, Any]:
        """Each row's token by the program for its own sampling: what else a program can do may round it otherwise."""
        hows: list[How | None] = [None] * len(self._tables)
        for chunk in step.chunks:
            if chunk.answers:
                hows[chunk.row] = self._how(Step([chunk]))
        chosen, logs = np.full((1, len(hows)), -1, np.int32), None
        for how in dict.fromkeys(one for one in hows if one is not None):
            mine = np.array([one == how for one in hows])
            new, new_logs = self._choose(how, self._logits, *places)
            chosen = jnp.where(mine, new, chosen)
            if how.logprobs:
                logs = new_logs if logs is None else steps.of_rows(mine, new_logs, logs)
        return jnp.asarray(chosen), logs

    def _choose(self, how: How, logits: jax.Array, *places: np.ndarray) -> tuple[jax.Array, Any]:
        started, texts = time.perf_counter(), self._texts if how.penalised else None
        found = steps.choose(logits, self._rows, texts, *places, how=how)
        if how not in self._choices:
            self._choices.add(how)
            self.compile_seconds += time.perf_counter() - started
        return found

    def _decode(self, step: Step) -> tuple[jax.Array, Any]:
        tokens, positions, left = self._no_rows()
        for chunk in step.chunks:
            (tokens[chunk.row],) = chunk.request.between(chunk.start, chunk.start + 1)
            positions[chunk.row], left[chunk.row] = chunk.start, 1 + chunk.ahead
        return self._run(steps.decode, self._how(step), tokens, positions, left)

    def _how(self, step: Step) -> How:
        return How.of(self._sampling[chunk.request] for chunk in step.chunks)

    def _run(self, program: Callable[..., Any], how: How, *tokens: np.ndarray) -> tuple[jax.Array, Any]:
        """Tokens chosen, [at most so many a row, rows], -1 where none was; and their log-probabilities or None."""
        key = program, len(tokens[0]), how
        if key not in self._programs:
            self._compile([(program, tokens)], how)
        # The host's, which travel with each call.
        state = self._cache, self._tables, self._rows, self._texts if how.penalised else None
        chosen, logs, self._cache = self._programs[key](self._weights, *state, *tokens)
        return chosen, logs

    def _compile(self, programs: Sequence[tuple[Any, tuple[np.ndarray, ...]]], how: How) -> None:
        """Of each program the tokens are an example."""
        started = time.perf_counter()
        static = dict(graph=self._graph, how=how, stops=self._stops, burst=self._scheduler.burst)
        texts = self._texts if how.penalised else None
        state = self._weights, self._cache, self._tables, self._rows, texts
        lowered = {
            (program, len(tokens[0]), how): program.lower(*state, *tokens, **static)
            for program, tokens in programs
        }
        with ThreadPoolExecutor() as pool:  # compiling leaves cores idle
            self._programs |= zip(
                lowered, pool.map(jax.stages.Lowered.compile, lowered.values()), strict=True
            )
        self.compile_seconds += time.perf_counter() - started
