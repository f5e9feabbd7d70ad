"""The host half of an engine: which tokens of which requests a step computes, and in which pages they lie.

Plain Python, without a model and without JAX. A step has a budget of tokens. Decoding requests come first, with a token
each, then prompts in progress, in chunks, then waiting requests; so answers keep flowing while prompts arrive. When no
prompt is being read, a step may produce several tokens of each answer, so that the host is asked less often.

A request holds pages for the tokens it has, not for those it may come to have. When pages run out, those that only the
prefix cache remembers are taken first. Then the newest request is preempted: its pages are freed; its tokens, answered
ones included, are kept and read like a prompt when its turn comes again. The oldest is never preempted, so all finish.

In a cache whose pages have scales, a page's contents depend on which of its tokens were written together. There whole
pages of a prompt are computed together, and tokens of an answer one by one, also after a preemption; and pages of
answers are not shared. So what a request reads does not depend on other requests.

An exception such as Ctrl-C may come at any line, and `restore` repairs the state. The truth is kept in three places,
each of which changes atomically: the fields of a request (requests.py), the book of served requests, and the tree of
the prefix cache. Running requests, free rows, free pages and references follow from these.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pallas_attn import PageAllocator
from pallas_attn._call.checks import check_int, fail
from pallas_attn.ops.kv_cache.allocator import OutOfPagesError

from .prefix_cache import PrefixCache
from .requests import Place, Request
from .stats import Totals

# Part of all pages that the prefix cache frees at a time.
_EVICTIONS = 64


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Tokens [start, start + count) of a request, and then up to `ahead` tokens of its answer, each as soon as it is
    chosen."""

    request: Request
    start: int
    count: int
    ahead: int = 0

    @property
    def row(self) -> int:
        assert self.request.row is not None, "a request with a chunk runs"
        return self.request.row

    @property
    def answers(self) -> bool:
        """Whether the last of these yields the request's next token."""
        return self.start + self.count == self.request.length


@dataclasses.dataclass(frozen=True)
class Step:
    """What to compute."""

    chunks: list[Chunk]

    @property
    def reads_prompts(self) -> bool:
        """Whether any request computes more than a single token."""
        return not all(chunk.answers and chunk.count == 1 for chunk in self.chunks)


class _Book(NamedTuple):
    """Requests being served, oldest first, and totals of earlier ones."""

    served: tuple[Request, ...] = ()
    past: Totals = Totals()


class Scheduler:
    """Deals out pages and steps. `submit`, `cancel` and the properties may be used by any thread at any time, the other
    methods by one at a time.

    Args:
        num_pages, page_size: of the pool.
        num_rows: requests that may run at once: rows of the block table.
        step_tokens: tokens in a step, at least `num_rows`, so that everything that decodes goes on in every step.
        burst: most tokens of an answer in a step in which no request reads its prompt.
        prefix_cache: whether equal prefixes share full pages.
        whole_pages: whether a page of a prompt is computed at once, and pages of answers token by token, always.
        stopped: whether the last token of a request's answer ends it, besides its stop tokens.

    Raises:
        TypeError, ValueError: a size that is no int or below 1; `step_tokens` below `num_rows`, or, with `whole_pages`,
        below `page_size`.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_rows: int,
        step_tokens: int,
        burst: int = 1,
        prefix_cache: bool = True,
        whole_pages: bool = False,
        stopped: Callable[[Request], bool] = lambda request: False,
    ):
        sizes = {"page_size": page_size, "num_rows": num_rows, "num_pages": num_pages, "burst": burst}
        for name, size in sizes.items():
            check_int("Scheduler", name, size, least=1)
        check_int(
            "Scheduler", "step_tokens", step_tokens, least=max(num_rows, page_size if whole_pages else 1)
        )
        self.whole_pages = whole_pages
        self.page_size, self.num_rows, self.step_tokens, self.burst = page_size, num_rows, step_tokens, burst
        self.allocator = PageAllocator(num_pages)
        self.prefixes = PrefixCache(self.allocator, page_size) if prefix_cache else None
        self._stopped = stopped
        self._numbers = itertools.count()
        # Any thread appends; the next step moves them into the book.
        self._arrivals: list[Request] = []
        self._book = _Book()

    @property
    def busy(self) -> bool:
        return not all(request.done for request in self._known()[1])

    @property
    def running(self) -> list[Request]:
        """Oldest first."""
        return [request for request in self._book.served if request.row is not None and not request.done]

    @property
    def waiting(self) -> list[Request]:
        """Oldest first."""
        return [request for request in self._known()[1] if request.row is None and not request.done]

    @property
    def free_pages(self) -> int:
        """Free pages, including those of ended requests, which the next step frees."""
        ended = Counter(page for request in self._book.served if request.done for page in request.pages)
        theirs = sum(self.allocator.references(page) == times for page, times in ended.items())
        return self.allocator.num_free + theirs

    @property
    def totals(self) -> Totals:
        past, requests = self._known()
        return past.plus(requests)

    def submit(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        stop_token_ids: Iterable[int] = (),
        sampling: Any = None,
    ) -> Request:
        """Queues a request. Raises ValueError for one that could never be served."""
        check_int("Scheduler.submit", "max_new_tokens", max_new_tokens, least=1)
        if not prompt:
            fail("Scheduler.submit", "prompt", "at least one token", "none")
        # The last token of an answer is never computed.
        room = self.allocator.num_pages * self.page_size
        if len(prompt) + max_new_tokens - 1 > room:
            expected = f"with max_new_tokens at most {room + 1} tokens ({self.allocator.num_pages} pages)"
            fail("Scheduler.submit", "prompt", expected, f"{len(prompt)} + {max_new_tokens}")
        stops = frozenset(stop_token_ids)
        request = Request(next(self._numbers), tuple(prompt), max_new_tokens, stops, sampling)
        self._arrivals.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Ends a request, in any state. One that has ended stays as it is."""
        request.end("cancelled")

    def next_step(self) -> Step:
        """What to compute next; without chunks only if nothing is left to do. After an interrupted step, its tokens
        without results are part of this one."""
        self._arrive()
        self._depart()
        chunks, left = [], self.step_tokens
        # Requests join by age, and one at a time takes the rest of a step. So only the newest has more than one token
        # to compute, and comes last, except after an interrupted step.
        running = self.running
        for request in list(running):
            start = request.computed
            count = self._count(request, start, left)
            if request.row is not None and count and self._grow(request, start + count, running):
                chunks.append(Chunk(request, start, count))
                left -= count
        rows = sorted(set(range(self.num_rows)) - {request.row for request in running}, reverse=True)
        for request in [request for request in self._book.served if request.row is None]:
            if not left or not rows or self._reads_on(running, chunks):
                break
            if not self._join(request, rows[-1], left):
                break
            rows.pop()
            running.append(request)
            chunks.append(Chunk(request, request.computed, self._count(request, request.computed, left)))
            left -= chunks[-1].count
        step = Step(chunks)
        if not step.reads_prompts:
            step.chunks[:] = [dataclasses.replace(chunk, ahead=self._ahead(chunk)) for chunk in chunks]
        return step

    def begin(self, step: Step) -> None:
        """Called once a step is dispatched: the device runs steps in order, so its results are available to later
        steps. So the host updates the prefix cache while the device computes."""
        for chunk in step.chunks:
            request = chunk.request
            computed = chunk.start + chunk.count
            request.place = request.place.with_computed(computed)
            # Answers are remembered when they end.
            filled = computed // self.page_size > chunk.start // self.page_size
            if filled and chunk.start < len(request.prompt):
                self._remember(request)

    def complete(
        self,
        step: Step,
        tokens: Mapping[Request, Sequence[int]],
        logprobs: Mapping[Request, Sequence[Any]] | None = None,
    ) -> list[Request]:
        """Takes a step's results: `tokens` has each answering request's next tokens, from one to 1 + `ahead`, up to one
        that ends it. Returns the requests that got some."""
        answered = []
        for chunk in step.chunks:
            request = chunk.request
            if request.done or not chunk.answers:  # cancelled meanwhile
                continue
            request.grow(tokens[request], (logprobs or {}).get(request, ()))
            # The last chosen token is not computed yet.
            request.place = request.place.with_computed(request.length - 1)
            answered.append(request)
            self._end_if_whole(request)
        self._depart()
        return answered

    def restore(self) -> None:
        """After an exception in any method, this one included: rebuilds the derived state."""
        held = [page for request in self._book.served for page in request.pages]
        if self.prefixes:
            self.prefixes.restore()
            held += self.prefixes.pages
        self.allocator.restore(held)
        for request in self._book.served:
            self._end_if_whole(request)

    def forget(self) -> None:
        """After the device has lost all pages: every request recomputes its tokens. Call `restore` next."""
        if self.prefixes:
            self.prefixes.forget()
        for request in self._book.served:
            request.place = request.place.left()

    def _known(self) -> tuple[Totals, list[Request]]:
        """Totals of past requests, and all current ones."""
        while True:
            book = self._book
            requests = list(dict.fromkeys((*book.served, *self._arrivals)))
            if book is self._book:  # otherwise a request might be counted never or twice
                return book.past, requests

    def _arrive(self) -> None:
        arrivals = self._arrivals[:]
        if arrivals:
            served = tuple(dict.fromkeys((*self._book.served, *arrivals)))
            self._book = self._book._replace(served=served)
        # In this order, so that no request is ever missing from both, or added twice.
        del self._arrivals[: len(arrivals)]

    def _depart(self) -> None:
        """Removes ended requests from the book and frees their pages."""
        if ended := [request for request in self._book.served if request.done]:
            for request in ended:
                self._leave(request)
            gone = set(ended)
            served = tuple(request for request in self._book.served if request not in gone)
            self._book = _Book(served, self._book.past.plus(ended))

    def _end_if_whole(self, request: Request) -> None:
        if not request.answer or request.done:
            return
        if request.answer[-1] in request.stop_token_ids or self._stopped(request):
            reason = "stop"
        elif len(request.answer) == request.max_new_tokens:
            reason = "length"
        else:
            return
        self._remember(request)
        request.end(reason)

    def _count(self, request: Request, computed: int, left: int) -> int:
        """How many more tokens of a request a step computes, given its remaining budget."""
        count, of_prompt = min(request.length - computed, left), len(request.prompt) - computed
        if not self.whole_pages:
            return count
        if of_prompt <= 0:
            return min(count, 1)
        return of_prompt if count >= of_prompt else count // self.page_size * self.page_size

    def _reads_on(self, running: Sequence[Request], chunks: Sequence[Chunk]) -> bool:
        """Whether the newest request has more of its prompt to read after these chunks: nobody joins before."""
        if not running:
            return False
        newest = running[-1]
        planned = sum(chunk.count for chunk in chunks if chunk.request is newest)
        return newest.computed + planned < len(newest.prompt)

    def _shared(self, request: Request, tokens: int) -> Sequence[int]:
        """The part of a request's first `tokens` tokens that may be shared with others."""
        return request.between(0, min(tokens, len(request.prompt)) if self.whole_pages else tokens)

    def _join(self, request: Request, row: int, left: int) -> bool:
        """Gives a waiting request a row, and pages for its known prefix and a first chunk. False, without changes, if
        there are not enough; nobody is preempted for a waiting request."""
        # The last token is computed in any case: what follows it is asked for.
        known = self.prefixes.match(self._shared(request, request.length - 1)) if self.prefixes else []
        for shared in (known, []):
            computed = len(shared) * self.page_size
            count = self._count(request, computed, left)
            needed = self._pages_for(computed + count) - len(shared)
            # Frees cached pages except those just found; failing that, without using the found prefix.
            if count and (own := self._allocate(needed)) is not None:
                place = request.place
                cached = computed if place.cached_tokens is None else place.cached_tokens
                request.place = Place(row, (*shared, *own), computed, computed, cached, place.preempted)
                return True
            self.allocator.free(shared)
        return False

    def _grow(self, request: Request, tokens: int, running: list[Request]) -> bool:
        """Gets pages for `tokens` tokens; preempts newer requests for them, and the request itself if there is none."""
        needed = self._pages_for(tokens) - len(request.pages)
        if needed <= 0:  # also after an interrupted step, or one that got no further than its first token
            return True
        while (own := self._allocate(needed)) is None:
            newest = running.pop()
            self._send_back(newest)
            if newest is request:
                return False
        request.place = request.place.with_pages(own)
        return True

    def _ahead(self, chunk: Chunk) -> int:
        """How far a decoding request may continue in this step with pages that are free."""
        request = chunk.request
        most = min(self.burst, request.max_new_tokens - len(request.answer))
        while len(request.pages) < self._pages_for(request.length + most - 1) and (own := self._allocate(1)):
            request.place = request.place.with_pages(own)
        return min(most, len(request.pages) * self.page_size - request.computed) - 1

    def _allocate(self, count: int) -> list[int] | None:
        if self.prefixes and count > self.allocator.num_free:
            # Freeing many costs hardly more than freeing one.
            some = self.allocator.num_pages // _EVICTIONS
            self.prefixes.evict(max(count - self.allocator.num_free, some))
        try:
            return self.allocator.allocate(count)
        except OutOfPagesError:
            return None

    def _send_back(self, request: Request) -> None:
        self._remember(request)
        self._leave(request, preempted=1)

    def _leave(self, request: Request, preempted: int = 0) -> None:
        pages = request.pages
        request.place = request.place.left(preempted)
        self.allocator.free(pages)

    def _remember(self, request: Request) -> None:
        if self.prefixes:
            self.prefixes.insert(self._shared(request, request.place.computed), request.pages)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)
