"""An engine without a model: its pool holds token ids where a model's holds keys and values.

The "model" answers with a function of everything that it reads through the block table. So a page that is lost, shared
wrongly, written by two or read too early shows as a wrong answer. Steps take microseconds, and all of the host's lines
are those of a real engine.
"""

import inspect
import sys
import time
import types
import zlib
from collections.abc import Iterator, Sequence

import numpy as np
from flax import nnx

from pallas_attn.models import Engine, choosing, prefix_cache, requests, runner, scheduler, stats, steps
from pallas_attn.models import engine as engine_module
from pallas_attn.ops.kv_cache import allocator

STOP, VOCABULARY = 0, 7
_MODULES = (engine_module, runner, scheduler, prefix_cache, requests, stats, allocator)
HOST = {module.__file__ for module in _MODULES}
"""Files whose lines a step runs, without the device's."""


def answer_to(tokens: Sequence[int]) -> int:
    return zlib.crc32(bytes(tokens)) % VOCABULARY


def logprob_of(tokens: Sequence[int]) -> float:
    return float(zlib.adler32(bytes(tokens)) % 1000)


def scores_of(tokens: Sequence[int]) -> np.ndarray:
    scores = np.zeros(VOCABULARY, np.float32)
    scores[answer_to(tokens)] = 1 + logprob_of(tokens)
    return scores


def whole_answer(prompt, max_new_tokens, stops=True, text: str = "") -> list[int]:
    answer: list[int] = []
    while len(answer) < max_new_tokens and not (stops and STOP in answer):
        answer.append(answer_to([*prompt, *answer]))
        if text and text in Digits().decode(answer):
            break
    return answer


class Digits:
    """A tokenizer."""

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(str, tokens))


class LostError(RuntimeError):
    """As JAX raises it for a buffer that was given away, or that a failed program was to fill."""


class Cache:
    """Given away with each step, as a real one is."""

    def __init__(self, pool: np.ndarray):
        self.pool, self.lost = pool, False

    def block_until_ready(self) -> None:
        if self.lost:
            raise LostError


class Unmade:
    """What a failed program was to fill."""

    T = property(lambda self: self)

    def __array__(self, *_, **__):
        raise LostError


class Model(nnx.Module):
    def __init__(self):
        self.config = types.SimpleNamespace(vocab_size=VOCABULARY, context_length=4096)
        self.batch_invariant = False

    def logits(self, _):
        raise NotImplementedError

    def create_cache(self, *, num_pages, page_size, **_) -> Cache:
        return Cache(np.full((num_pages, page_size), -1, np.int32))


class Device:
    """In place of an engine's compiled programs.

    fails: asked in each step; "before" and "after" interrupt it before and after it has taken the cache, "" computes a
        failed result.
    seconds: that a step takes, in which other threads run.
    """

    def __init__(self, engine: Engine, fails=lambda: None, seconds: float = 0.0):
        self.engine, self.fails, self.seconds = engine, fails, seconds

    def __contains__(self, key) -> bool:
        return True

    def __getitem__(self, key):
        program, _, how = key
        run = {steps.mixed: self._mixed, steps.decode: self._decode, steps.scores: self._scores}[program]

        def call(weights, cache: Cache, tables, rows, texts, *arguments):
            how_it_fails = self.fails()
            if how_it_fails == "before":
                raise KeyboardInterrupt
            if cache.lost:
                raise LostError
            cache.lost = True
            if how_it_fails == "after":
                raise KeyboardInterrupt
            if self.seconds:
                time.sleep(self.seconds)
            new = Cache(cache.pool)
            if how_it_fails == "":
                new.lost, chosen = True, Unmade()
                new.pool[:] = -1
                return chosen, None, new
            chosen, chances = run(new.pool, tables, *arguments)
            return chosen, self._logs(how, chosen, chances), new

        return call

    def _seen(self, pool, table, count: int) -> list[int]:
        pages = table[: -(-count // pool.shape[1])]
        assert (pages >= 0).all(), "a table without the pages that are read"
        return pool[pages].reshape(-1)[:count].tolist()

    def _write(self, pool, table, at: int, token: int) -> None:
        page = table[at // pool.shape[1]]
        pool[page, at % pool.shape[1]] = token

    def choose(self, how, scores, positions, bounds):
        """In place of an engine's choice from scores."""
        scores = np.asarray(scores)
        chosen = np.where(np.diff(bounds) > 0, scores.argmax(axis=1), -1)[None]
        return chosen, self._logs(how, chosen, scores.max(axis=1)[None] - 1)

    def _logs(self, how, chosen, chances):
        return choosing.Logprobs(chances, chances[..., None], chosen[..., None]) if how.logprobs else None

    def _scores(self, pool, tables, tokens, positions, bounds):
        scores = np.zeros((len(tables), VOCABULARY), np.float32)
        for row, seen in self._read(pool, tables, tokens, positions, bounds):
            scores[row] = scores_of(seen)
        return scores, None

    def _mixed(self, pool, tables, tokens, positions, bounds):
        chosen, chances = np.full((1, len(tables)), -1, np.int32), np.zeros((1, len(tables)))
        for row, seen in self._read(pool, tables, tokens, positions, bounds):
            chosen[0, row], chances[0, row] = answer_to(seen), logprob_of(seen)
        return chosen, chances

    def _read(self, pool, tables, tokens, positions, bounds) -> Iterator[tuple[int, list[int]]]:
        """Each row that has tokens here, and all that it sees."""
        for row, table in enumerate(tables):
            for at in range(bounds[row], bounds[row + 1]):
                self._write(pool, table, positions[at], tokens[at])
        for row, table in enumerate(tables):
            if bounds[row] < bounds[row + 1]:
                yield row, self._seen(pool, table, positions[bounds[row + 1] - 1] + 1)

    def _decode(self, pool, tables, tokens, positions, left):
        burst = self.engine._scheduler.burst
        chosen, chances = np.full((burst, len(tables)), -1, np.int32), np.zeros((burst, len(tables)))
        for row, table in enumerate(tables):
            token, at = tokens[row], positions[row]
            for index in range(left[row] if at >= 0 else 0):
                self._write(pool, table, at + index, token)
                seen = self._seen(pool, table, at + index + 1)
                token = chosen[index, row] = answer_to(seen)
                chances[index, row] = logprob_of(seen)
                if token == STOP:
                    break
        return chosen, chances


def engine_of(fails=lambda: None, seconds: float = 0.0, **sizes) -> Engine:
    sizes = {"max_len": 48, "num_rows": 3, "page_size": 3, "step_tokens": 8, "burst": 3, **sizes}
    engine = Engine(Model(), stop_token_ids=[STOP], tokenizer=Digits(), **sizes)  # pyright: ignore
    runner = engine._runner
    runner.programs = device = Device(engine, fails, seconds)  # pyright: ignore
    runner._choose = device.choose
    return engine


def run(engine: Engine) -> None:
    for _ in range(10_000):
        if not engine.busy:
            return
        engine.step()
    raise AssertionError("no end")


def check_pages(engine: Engine, served: Sequence[requests.Request] = ()) -> None:
    """No page is lost, and each has the owners that hold it."""
    scheduler = engine._scheduler
    remembered = scheduler.prefixes.pages if scheduler.prefixes else []
    holders = [page for request in served for page in request.pages] + remembered
    for page in range(scheduler.allocator.num_pages):
        assert scheduler.allocator.references(page) == holders.count(page), "lost pages, or too free"
    assert engine.free_pages == scheduler.allocator.num_pages - len(set(holders))


class Interrupts:
    """Raises KeyboardInterrupt before a line of `files`, or before an instruction of one, as a signal would: the one
    `after` so many, or the next that stands at `place`.

    hit: places before which it was raised. seen: all that were run while it was armed.
    """

    _TOOL = 4

    def __init__(self, files: set[str], instructions: bool = False):
        events = sys.monitoring.events
        self.files, self._event = files, events.INSTRUCTION if instructions else events.LINE
        self.hit: set[tuple[str, str, int]] = set()
        self.seen: set[tuple[str, str, int]] = set()
        self.count, self.total = 0, 0
        self.armed = False
        self.after: int | None = None
        self.place: tuple[str, str, int] | None = None

    def __enter__(self) -> "Interrupts":
        monitoring = sys.monitoring
        monitoring.use_tool_id(self._TOOL, "interrupts")
        monitoring.register_callback(self._TOOL, self._event, self._met)
        monitoring.set_events(self._TOOL, self._event)
        return self

    def __exit__(self, *_) -> None:
        sys.monitoring.set_events(self._TOOL, 0)
        sys.monitoring.register_callback(self._TOOL, self._event, None)
        sys.monitoring.free_tool_id(self._TOOL)
        sys.monitoring.restart_events()

    def arm(self, after: int | None = None, place: tuple[str, str, int] | None = None) -> None:
        self.armed, self.count, self.after, self.place = True, 0, after, place

    def disarm(self) -> None:
        self.armed, self.after, self.place = False, None, None

    def _met(self, code, at: int):
        if code.co_filename not in self.files:
            return sys.monitoring.DISABLE
        # A generator that is left early is closed where no exception comes out of it.
        if not self.armed or code.co_flags & inspect.CO_GENERATOR:
            return None
        place = code.co_filename, code.co_qualname, at
        self.seen.add(place)
        self.count += 1
        if self.place == place or (self.after is not None and self.count > self.after):
            self.disarm()
            self.hit.add(place)
            self.total += 1
            raise KeyboardInterrupt
        return None
