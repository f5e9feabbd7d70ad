"""Which tokens of which requests a step computes, and in which pages they lie: the host's half of an engine.

Plain Python, without a model and without JAX. A step has room for a number of tokens. Requests that decode come first,
a token each, then prompts that have begun, in chunks, then requests that wait; so answers flow while prompts arrive.
When none reads its prompt, a step may go on for some tokens of each answer, and the host is asked less often.

A request holds pages for the tokens it has, not for those it may come to have. When pages run out, those that only the
prefix cache remembers are taken first. Then the newest request goes back into the queue: its pages are freed, its
tokens, answered ones too, are kept, and become its prompt when its turn comes again. The oldest is never sent back, so
everything ends.

In a cache whose pages have scales, what a page holds depends on which of its tokens came together. There whole pages of
a prompt are computed together, and tokens of an answer one by one, also those of a request that was sent back; and of
answers no page is shared. So what a request reads does not depend on what runs beside it or ran before.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pallas_attn import PageAllocator
from pallas_attn._call.checks import check_int, fail
from pallas_attn.ops.kv_cache.allocator import OutOfPagesError

from .prefix_cache import PrefixCache

# Of all pages such a part is given back at a time, when the prefix cache has to give back any.
_EVICTIONS = 64


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt and what was answered so far.

    number: of submission; a lower one is older.
    computed: how many of its tokens have keys and values in `pages`.
    reused: how many of these were found when it last joined: full pages of an equal prefix of others.
    row: its row of the block table while it runs, else None.
    preempted: how often it was sent back.
    logprobs: of each token of the answer, where its `Sampling` asks for them.
    """

    number: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    answer: list[int] = dataclasses.field(default_factory=list)
    pages: list[int] = dataclasses.field(default_factory=list)
    computed: int = 0
    reused: int = 0
    row: int | None = None
    done: bool = False
    preempted: int = 0
    logprobs: list[Any] = dataclasses.field(default_factory=list)

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.answer)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.answer)

    @property
    def missing(self) -> int:
        """Tokens without keys and values."""
        return self.length - self.computed

    def between(self, start: int, end: int) -> Sequence[int]:
        """Tokens [start, end)."""
        if start < len(self.prompt):
            return self.prompt[start:end] if end <= len(self.prompt) else self.tokens[start:end]
        return self.answer[start - len(self.prompt) : end - len(self.prompt)]


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
        """Whether the request's next token follows from the last of these."""
        return self.start + self.count == self.request.length


@dataclasses.dataclass(frozen=True)
class Step:
    """What to compute."""

    chunks: list[Chunk]

    @property
    def reads_prompts(self) -> bool:
        """Whether any request has more to compute than the last token of its answer, or of its prompt."""
        return not all(chunk.answers and chunk.count == 1 for chunk in self.chunks)


class Scheduler:
    """Deals out pages and steps.

    Args:
        num_pages, page_size: of the pool.
        num_rows: requests that may run at once: rows of the block table.
        step_tokens: tokens in a step, at least `num_rows`, so that everything that decodes goes on in every step.
        burst: most tokens of an answer in a step in which no request reads its prompt.
        prefix_cache: whether equal prefixes share full pages.
        whole_pages: whether a page of a prompt is computed at once, and pages of answers token by token, always.

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
    ):
        sizes = {"page_size": page_size, "num_rows": num_rows, "num_pages": num_pages, "burst": burst}
        for name, size in sizes.items():
            check_int("Scheduler", name, size, least=1)
        check_int(
            "Scheduler", "step_tokens", step_tokens, least=max(num_rows, page_size if whole_pages else 1)
        )
        self.whole_pages = whole_pages
        self.page_size, self.step_tokens, self.burst = page_size, step_tokens, burst
        self.allocator = PageAllocator(num_pages)
        self.prefixes = PrefixCache(self.allocator, page_size) if prefix_cache else None
        self.running: list[Request] = []  # oldest first
        self.waiting: list[Request] = []  # oldest first
        self._rows = list(range(num_rows - 1, -1, -1))
        self._numbers = itertools.count()
        # Of a step that was given up: begun and not completed.
        self._unanswered: Sequence[Chunk] = ()

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def submit(
        self, prompt: Sequence[int], max_new_tokens: int, stop_token_ids: Iterable[int] = ()
    ) -> Request:
        """A request, which waits for its turn. Raises ValueError for one that could never be served."""
        check_int("Scheduler.submit", "max_new_tokens", max_new_tokens, least=1)
        if not prompt:
            fail("Scheduler.submit", "prompt", "at least one token", "none")
        # The last token of an answer is never computed.
        room = self.allocator.num_pages * self.page_size
        if len(prompt) + max_new_tokens - 1 > room:
            expected = f"with max_new_tokens at most {room + 1} tokens ({self.allocator.num_pages} pages)"
            fail("Scheduler.submit", "prompt", expected, f"{len(prompt)} + {max_new_tokens}")
        request = Request(next(self._numbers), tuple(prompt), max_new_tokens, frozenset(stop_token_ids))
        self.waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Ends a request, whatever it is about; its pages are free at once. One that has ended stays as it is."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif not request.done:
            self._leave(request)
        request.done = True

    def next_step(self) -> Step:
        """What to compute next; its chunks are none only if nothing is left to do.

        A step that was given up, by an exception wherever it had got, is made up for: tokens whose answers never came
        are part of this one.
        """
        for chunk in self._unanswered:
            if chunk.answers and not chunk.request.done:
                chunk.request.computed -= 1
        self._unanswered = ()
        chunks, left = [], self.step_tokens
        # Requests join in the order of their numbers, and one at a time takes what is left of a step. So only the
        # newest may have more than one token to compute, and it comes last.
        for request in list(self.running):
            count = self._count(request, request.computed, left)
            if request.row is not None and count and self._grow(request, request.computed + count):
                chunks.append(Chunk(request, request.computed, count))
                left -= count
        while not self._reads_on(chunks) and left and self.waiting and self._rows:
            if not self._join(self.waiting[0], left):
                break
            request = self.waiting.pop(0)
            self.running.append(request)
            chunks.append(Chunk(request, request.computed, self._count(request, request.computed, left)))
            left -= chunks[-1].count
        step = Step(chunks)
        if not step.reads_prompts:
            step.chunks[:] = [dataclasses.replace(chunk, ahead=self._ahead(chunk)) for chunk in chunks]
        return step

    def begin(self, step: Step) -> None:
        """As soon as a step is on its way to the device, which computes steps in their order: what it computes is there
        for those that follow it. So the host remembers prompts while the device reads them."""
        self._unanswered = step.chunks
        for chunk in step.chunks:
            request = chunk.request
            request.computed += chunk.count
            # Answers are remembered when they end.
            filled = request.computed // self.page_size > chunk.start // self.page_size
            if filled and chunk.start < len(request.prompt):
                self._remember(request)

    def complete(self, step: Step, tokens: Mapping[Request, Sequence[int]]) -> list[Request]:
        """After a step that has begun: `tokens` has the next tokens of each request whose chunk answers, at least one,
        up to one that ends it and no more than 1 + `ahead`. The requests that got some."""
        answered = []
        for chunk in step.chunks:
            request = chunk.request
            if request.done or not chunk.answers:  # cancelled meanwhile
                continue
            new = tokens[request]
            # The last one chosen is not computed yet.
            request.computed += len(new) - 1
            request.answer += new
            answered.append(request)
            full = len(request.answer) == request.max_new_tokens
            if full or request.answer[-1] in request.stop_token_ids:
                self._remember(request)
                self._leave(request)
                request.done = True
        self._unanswered = ()
        return answered

    def _count(self, request: Request, computed: int, left: int) -> int:
        """How many tokens of a request, of which some are computed, a step computes that has room for so many more."""
        count, of_prompt = min(request.length - computed, left), len(request.prompt) - computed
        if not self.whole_pages:
            return count
        if of_prompt <= 0:
            return min(count, 1)
        return of_prompt if count >= of_prompt else count // self.page_size * self.page_size

    def _reads_on(self, chunks: Sequence[Chunk]) -> bool:
        """Whether the newest request has more of its prompt to read behind these chunks: nobody joins before that."""
        if not self.running:
            return False
        newest = self.running[-1]
        planned = sum(chunk.count for chunk in chunks if chunk.request is newest)
        return newest.computed + planned < len(newest.prompt)

    def _shared(self, request: Request, tokens: int) -> Sequence[int]:
        """What others may share, or this request with others, of its first `tokens` tokens."""
        return request.between(0, min(tokens, len(request.prompt)) if self.whole_pages else tokens)

    def _join(self, request: Request, left: int) -> bool:
        """Gives a waiting request a row, and pages for what the prefix cache knows and a first chunk. False, and
        nothing has changed, if there are not enough; nobody is sent back for one who waits."""
        # The last token is computed in any case: what follows it is asked for.
        known = self.prefixes.match(self._shared(request, request.length - 1)) if self.prefixes else []
        for shared in (known, []):
            computed = len(shared) * self.page_size
            count = self._count(request, computed, left)
            needed = self._pages_for(computed + count) - len(shared)
            # What only the cache holds may go, but not what was just found; without the latter there may be room.
            if count and (own := self._allocate(needed)) is not None:
                request.pages, request.row = [*shared, *own], self._rows.pop()
                request.computed = request.reused = computed
                return True
            self.allocator.free(shared)
        return False

    def _grow(self, request: Request, tokens: int) -> bool:
        """Pages for `tokens` tokens; sends newer requests back for them, and the request itself if there is none."""
        # A step that was given up, or got no further than its first token, leaves pages that it took ahead.
        needed = max(self._pages_for(tokens) - len(request.pages), 0)
        while (own := self._allocate(needed)) is None:
            newest = self.running[-1]
            self._send_back(newest)
            if newest is request:
                return False
        request.pages += own
        return True

    def _ahead(self, chunk: Chunk) -> int:
        """How far a request that decodes may go on in this step, in pages that need not be taken from anybody."""
        request = chunk.request
        most = min(self.burst, request.max_new_tokens - len(request.answer))
        while len(request.pages) < self._pages_for(request.length + most - 1) and (own := self._allocate(1)):
            request.pages += own
        return min(most, len(request.pages) * self.page_size - request.computed) - 1

    def _allocate(self, count: int) -> list[int] | None:
        if self.prefixes and count > self.allocator.num_free:
            # Looking for many costs hardly more than looking for one.
            some = self.allocator.num_pages // _EVICTIONS
            self.prefixes.evict(max(count - self.allocator.num_free, some))
        try:
            return self.allocator.allocate(count)
        except OutOfPagesError:
            return None

    def _send_back(self, request: Request) -> None:
        self._remember(request)
        self._leave(request)
        request.preempted += 1
        bisect.insort(self.waiting, request, key=lambda request: request.number)

    def _leave(self, request: Request) -> None:
        assert request.row is not None
        self.running.remove(request)
        self._rows.append(request.row)
        self.allocator.free(request.pages)
        request.pages, request.computed, request.row = [], 0, None

    def _remember(self, request: Request) -> None:
        if self.prefixes:
            self.prefixes.insert(self._shared(request, request.computed), request.pages)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)
