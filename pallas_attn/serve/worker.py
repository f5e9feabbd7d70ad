"""The engine's thread, and the jobs that the event loop waits for.

Only this thread uses the engine: the loop's commands go through a queue and are executed between steps. After each step
the loop is notified once of everything new.
"""

import asyncio
import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pallas_attn.models import Engine, Request, Sampling

from .asked import refusal
from .errors import ApiError

_log = logging.getLogger(__name__)
# Seconds to wait after a failed step.
_PAUSE = 0.05


class Job:
    """An answer in progress. Its attributes change only in the event loop, before `changed` is set.

    count: tokens that may be read.
    done: whether there will be no more.
    error: why there will be no more, if not by the request's own end.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling,
        stream: bool,
        changed: asyncio.Event,
    ):
        self.prompt, self.max_new_tokens, self.sampling = prompt, max_new_tokens, sampling
        self.stream, self.changed = stream, changed
        self.request: Request | None = None
        self.count, self.done = 0, False
        self.error: ApiError | None = None
        self.submitted = time.perf_counter()
        self.first: float | None = None  # time of its first token
        self.ended: float | None = None

    @property
    def finish_reason(self) -> str | None:
        return None if self.request is None else self.request.finish_reason

    @property
    def cached_tokens(self) -> int:
        return 0 if self.request is None else self.request.cached_tokens

    def tokens(self, start: int) -> list[int]:
        return [] if self.request is None else self.request.answer[start : self.count]

    def logprobs(self, start: int) -> list[Any]:
        return [] if self.request is None else self.request.logprobs[start : self.count]


class Worker:
    """Attributes:
    failing: whether the last step failed.
    on_end: called in the event loop with each job that has ended.
    """

    def __init__(self, engine: Engine, on_end: Callable[[Job], None] = lambda job: None):
        self.engine, self.on_end = engine, on_end
        self.failing = False
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopping = False
        # Used by the event loop.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: set[Job] = set()
        # Used by the engine's thread.
        self._jobs: dict[Request, Job] = {}

    def start(self) -> None:
        """Starts the thread, from the event loop that waits for jobs."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Ends the thread after its current step; unfinished jobs get an error."""
        self._stopping = True
        self.end_all(ApiError(503, "the server has stopped", code="stopped"))
        self._commands.put(lambda: None)
        await asyncio.to_thread(self._thread.join)

    @contextlib.contextmanager
    def submitted(self, jobs: Sequence[Job], timeout: float) -> Iterator[None]:
        """Runs jobs while the body runs; unfinished ones are then cancelled."""
        assert self._loop is not None, "start() comes first"
        late = ApiError(504, f"the answer took longer than {timeout:g} s", code="timeout")
        # The request timed out; clients would retry with other codes.
        late.headers["x-should-retry"] = "false"
        timer = self._loop.call_later(timeout, self._end, jobs, late)
        self._open.update(jobs)
        for job in jobs:
            self._commands.put(functools.partial(self._begin, job))
        try:
            yield
        finally:
            timer.cancel()
            self._end(jobs, None)

    def end_all(self, error: ApiError) -> None:
        """Fails all open jobs."""
        self._end(list(self._open), error)

    def _end(self, jobs: Sequence[Job], error: ApiError | None) -> None:
        for job in jobs:
            if job in self._open:
                self._commands.put(functools.partial(self._cancel, job))
                self._finished(job, error)

    def _finished(self, job: Job, error: ApiError | None) -> None:
        job.error, job.done, job.ended = error, True, time.perf_counter()
        self._open.discard(job)
        self.on_end(job)
        job.changed.set()

    # Methods below run in the engine's thread.

    def _run(self) -> None:
        try:
            while self._obeyed():
                try:
                    new = self.engine.step()
                except Exception:
                    self._failed()
                else:
                    self.failing = False
                    self._tell(new)
        finally:
            self.failing = True  # without this thread nothing would progress

    def _obeyed(self) -> bool:
        """Executes commands, waiting for one if there is nothing else to do. False if the thread should end."""
        with contextlib.suppress(queue.Empty):
            self._commands.get(block=not self.engine.busy)()
            while True:
                self._commands.get_nowait()()
        return not self._stopping

    def _begin(self, job: Job) -> None:
        if job.done:  # its client has disconnected meanwhile
            return
        try:
            request = self.engine.submit(job.prompt, max_new_tokens=job.max_new_tokens, sampling=job.sampling)
        except (ValueError, TypeError) as error:
            self._in_loop(self._hear, [(job, 0, True, refusal(error))])
        except Exception:
            _log.exception("a request could not be submitted")
            self._in_loop(self._hear, [(job, 0, True, _engine_failed())])
        else:
            self._jobs[request] = job
            job.request = request

    def _cancel(self, job: Job) -> None:
        if job.request is not None and self._jobs.pop(job.request, None):
            self.engine.cancel(job.request)

    def _tell(self, new: dict[Request, list[int]]) -> None:
        news = []
        for request, job in list(self._jobs.items()):
            if request in new and job.first is None:
                job.first = time.perf_counter()
            if request.done:
                del self._jobs[request]
            if request.done or (job.stream and request in new):
                news.append((job, len(request.answer), request.done, _error_of(request)))
        if news:
            self._in_loop(self._hear, news)

    def _failed(self) -> None:
        """The engine recovers in the next step, and after several failures gives up requests by itself."""
        if not self.failing:
            _log.exception("a step failed")
        self.failing = True
        self._tell({})
        time.sleep(_PAUSE)

    def _in_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended; nobody waits
            self._loop.call_soon_threadsafe(function, *arguments)

    def _hear(self, news: list[tuple[Job, int, bool, ApiError | None]]) -> None:
        """Runs in the event loop."""
        for job, count, done, error in news:
            if not job.done:
                job.count = count
                if done:
                    self._finished(job, error)
                job.changed.set()


def _error_of(request: Request) -> ApiError | None:
    return _engine_failed() if request.finish_reason == "error" else None


def _engine_failed() -> ApiError:
    return ApiError(500, "the engine failed; the server's log says how", code="engine_failed")
