"""The device half of an engine: its programs, the cache, and each row's data for the device.

A step (scheduler.py) runs a program of static shape (steps.py), compiled on first use. The mixed program computes up to
`step_tokens` tokens, chunks of prompts and tokens of answers, in the ragged form of the attention modules; a smaller
one does the same for steps with few tokens; the third, when no prompt is being read, produces up to `burst` tokens of
every answer, chosen on the device.

The cache is donated to each program and returned by it, so keys and values stay in place. Everything else that changes
is kept on the host and passed to each call: a row's pages, its sampling, and its text where sampling needs it.
"""

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call.optional import needs_extra

with needs_extra("models", user="pallas_attn.models.runner"):
    from flax import nnx

from . import steps
from .requests import Request
from .sampling import How, Rows
from .scheduler import Step

# Steps that fit in this part of `step_tokens` run a smaller program, if it is large enough to be worth compiling, so
# that a turn of a chat is quick.
_FEW = 8
_WORTH_COMPILING = 32


class Results(NamedTuple):
    """The results of a dispatched step: tokens [most a row, num_rows], -1 where none was chosen; their
    log-probabilities or None; for batch-invariant steps the scores [num_rows, vocab_size] before penalties, otherwise
    None."""

    tokens: Any
    logprobs: Any = None
    scores: Any = None


class Runner:
    """Runs steps on the device, for one thread at a time.

    Args:
        model: whose programs these are.
        num_rows, max_len, num_pages, page_size, step_tokens, burst: the engine's.
        stops: tokens that end every answer.
        batch_invariant: whether one program computes every step, whatever is in it, and each row's token is chosen by
            the program for its own sampling alone.
        cache_dtype: of the cache; None: the model's.

    Attributes:
        cache: what rows have stored.
        programs: that are compiled, by function, tokens and `How`.
        compile_seconds: spent compiling so far.
    """

    def __init__(
        self,
        model: steps.Decoder,
        *,
        num_rows: int,
        max_len: int,
        num_pages: int,
        page_size: int,
        step_tokens: int,
        burst: int,
        stops: tuple[int, ...],
        batch_invariant: bool,
        cache_dtype: Any,
    ):
        self._graph, self._weights = nnx.split(model)
        self._vocab_size, self._invariant = model.config.vocab_size, batch_invariant
        self._num_rows, self._max_len, self._pages_each = num_rows, max_len, -(-max_len // page_size)
        self._static = dict(graph=self._graph, stops=stops, burst=burst)
        few = step_tokens // _FEW
        few_as_well = few >= max(num_rows, _WORTH_COMPILING) and not batch_invariant
        self._rooms = [few, step_tokens] if few_as_well else [step_tokens]
        self.create_rows()
        self._create_cache = functools.partial(
            model.create_cache,
            num_pages=num_pages,
            page_size=page_size,
            block_tables=jnp.asarray(self._tables),
            dtype=cache_dtype,
        )
        self.create_cache()
        self.programs: dict[Any, Callable[..., Any]] = {}
        self._choices: set[How] = set()  # that are compiled
        self.compile_seconds = 0.0

    def create_cache(self) -> None:
        """An empty cache."""
        self.cache = self._create_cache()

    def lost_cache(self) -> bool:
        """Whether the cache was donated to a program that failed or never returned it."""
        try:
            jax.block_until_ready(self.cache)
        except Exception:
            return True
        return False

    def create_rows(self) -> None:
        """Resets the host's arrays of row data. New arrays: the device may still be reading the old ones."""
        num_rows = self._num_rows
        self._tables = np.full((num_rows, self._pages_each), -1, np.int32)
        self._rows = Rows.greedy(num_rows)
        lengths = np.zeros(num_rows, np.int32)
        self._texts = steps.Texts(np.full((num_rows, self._max_len), -1, np.int32), lengths)
        self._held: list[tuple[Request, tuple[int, ...]] | None] = [None] * num_rows

    def run(self, step: Step) -> Results:
        """Dispatches a step that has chunks, without waiting for the device."""
        for chunk in step.chunks:
            self._fill_row(chunk.row, chunk.request)
        if self._invariant:
            return self._scored(step)
        if step.reads_prompts:
            return self._run(steps.mixed, _how(step), *self._tokens_of(step))
        tokens, positions, left = self._no_rows()
        for chunk in step.chunks:
            (tokens[chunk.row],) = chunk.request.between(chunk.start, chunk.start + 1)
            positions[chunk.row], left[chunk.row] = chunk.start, 1 + chunk.ahead
        return self._run(steps.decode, _how(step), tokens, positions, left)

    def compile(self, how: How) -> None:
        """All programs that such rows may need, side by side."""
        if self._invariant:
            tokens = self._no_tokens(*self._rooms)
            self._compile([(steps.scores, tokens)], How())
            self._choose(how, jnp.zeros((self._num_rows, self._vocab_size), jnp.float32), *tokens[1:])
            return
        mixed = [(steps.mixed, self._no_tokens(room)) for room in self._rooms]
        self._compile([(steps.decode, self._no_rows()), *mixed], how)

    def _fill_row(self, row: int, request: Request) -> None:
        """Updates a row for a new request, or for new pages of its request."""
        if self._held[row] != (request, request.pages):
            self._tables[row, : len(request.pages)] = request.pages
            self._rows.fill(row, request.sampling)
            self._held[row] = request, request.pages
        if request.sampling.penalised:
            self._texts.tokens[row] = -1
            self._texts.tokens[row, : request.length] = request.tokens
            self._texts.prompt_lengths[row] = len(request.prompt)

    def _no_tokens(self, room: int) -> tuple[np.ndarray, ...]:
        """Tokens, positions and bounds of a mixed step without any."""
        bounds = np.zeros(self._num_rows + 1, np.int32)
        return np.zeros(room, np.int32), np.full(room, -1, np.int32), bounds

    def _no_rows(self) -> tuple[np.ndarray, ...]:
        """Tokens, positions and how many to choose, of a step of answers without any."""
        rows = self._num_rows
        return np.zeros(rows, np.int32), np.full(rows, -1, np.int32), np.zeros(rows, np.int32)

    def _tokens_of(self, step: Step) -> tuple[np.ndarray, ...]:
        """Tokens, positions and bounds of a mixed step."""
        count, at = sum(chunk.count for chunk in step.chunks), 0
        tokens, positions, bounds = self._no_tokens(next(room for room in self._rooms if count <= room))
        for chunk in sorted(step.chunks, key=lambda chunk: chunk.row):
            end = chunk.start + chunk.count
            tokens[at : at + chunk.count] = chunk.request.between(chunk.start, end)
            positions[at : at + chunk.count] = range(chunk.start, end)
            at += chunk.count
            bounds[chunk.row + 1] = chunk.count
        return tokens, positions, bounds.cumsum(dtype=np.int32)

    def _scored(self, step: Step) -> Results:
        """Each row's token, by the program for its own sampling: other code in it might change rounding."""
        tokens, *places = self._tokens_of(step)
        scores, *_ = self._run(steps.scores, How(), tokens, *places)
        hows: list[How | None] = [None] * self._num_rows
        for chunk in step.chunks:
            if chunk.answers:
                hows[chunk.row] = _how(Step([chunk]))
        chosen, logs = np.full((1, len(hows)), -1, np.int32), None
        for how in dict.fromkeys(one for one in hows if one is not None):
            mine = np.array([one == how for one in hows])
            new, new_logs = self._choose(how, scores, *places)
            chosen = jnp.where(mine, new, chosen)
            if how.logprobs:
                logs = new_logs if logs is None else steps.of_rows(mine, new_logs, logs)
        return Results(chosen, logs, scores)

    def _choose(self, how: How, scores: jax.Array, *places: np.ndarray) -> tuple[jax.Array, Any]:
        started, texts = time.perf_counter(), self._texts if how.penalised else None
        found = steps.choose(scores, self._rows, texts, *places, how=how)
        if how not in self._choices:
            self._choices.add(how)
            self.compile_seconds += time.perf_counter() - started
        return found

    def _run(self, program: Callable[..., Any], how: How, *tokens: np.ndarray) -> Results:
        """The program's results without the cache."""
        key = program, len(tokens[0]), how
        if key not in self.programs:
            self._compile([(program, tokens)], how)
        state = self.cache, self._tables, self._rows, self._texts if how.penalised else None
        chosen, logs, self.cache = self.programs[key](self._weights, *state, *tokens)
        return Results(chosen, logs)

    def _compile(self, programs: Sequence[tuple[Any, tuple[np.ndarray, ...]]], how: How) -> None:
        """Compiles all programs in parallel; each is given by example tokens."""
        started = time.perf_counter()
        texts = self._texts if how.penalised else None
        state = self._weights, self.cache, self._tables, self._rows, texts
        lowered = {
            (program, len(tokens[0]), how): program.lower(*state, *tokens, how=how, **self._static)
            for program, tokens in programs
        }
        with ThreadPoolExecutor() as pool:  # compiling leaves cores idle
            self.programs |= zip(lowered, pool.map(jax.stages.Lowered.compile, lowered.values()), strict=True)
        self.compile_seconds += time.perf_counter() - started


def _how(step: Step) -> How:
    return How.of(chunk.request.sampling for chunk in step.chunks)
