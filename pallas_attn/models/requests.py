"""A request: its prompt, its answer so far, why it ended, and its pages while it runs.

These few fields are the whole state of serving. Everything else that a scheduler and an engine keep (free pages, owners
of pages, rows of the block table) follows from them, and is rebuilt after an exception in the middle of something. So
each field changes atomically: an interrupt finds the old value or the new one.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

FinishReason = Literal["stop", "length", "cancelled", "error"]


class Place(NamedTuple):
    """Where a request's tokens lie. Immutable, replaced as a whole."""

    row: int | None = None
    """Row of the block table while it runs, otherwise None."""
    pages: tuple[int, ...] = ()
    computed: int = 0
    """How many of its tokens have keys and values in `pages`."""
    reused: int = 0
    cached_tokens: int | None = None
    """None until it has joined for the first time."""
    preempted: int = 0

    # `_replace` takes twice as long, and this is done for every row of every step.
    def with_pages(self, more: Sequence[int]) -> "Place":
        return Place(self.row, (*self.pages, *more), *self[2:])

    def with_computed(self, computed: int) -> "Place":
        return Place(self.row, self.pages, computed, *self[3:])

    def left(self, preempted: int = 0) -> "Place":
        """The same without row and pages."""
        return Place(None, (), 0, self.reused, self.cached_tokens, self.preempted + preempted)


class End(NamedTuple):
    reason: FinishReason
    error: str | None = None


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt and what was answered so far.

    number: of submission.
    sampling: how its tokens are chosen; the scheduler does not look at it.
    place: where it lies.
    """

    number: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    sampling: Any = None
    answer: list[int] = dataclasses.field(default_factory=list)
    place: Place = dataclasses.field(default=Place(), repr=False)
    _logprobs: list[Any] = dataclasses.field(default_factory=list, repr=False)
    # The first one counts. Several threads may end a request at once: appending to a list needs no lock.
    _ends: list[End] = dataclasses.field(default_factory=list, repr=False)

    @property
    def finish_reason(self) -> FinishReason | None:
        """None while it waits or runs. Then "stop": a stop token, which is the answer's last, or a stop text, which its
        last token completes; "length": it has `max_new_tokens`; "cancelled"; or "error": see `error`."""
        return self._ends[0].reason if self._ends else None

    @property
    def error(self) -> str | None:
        """The error in one line, if that ended it."""
        return self._ends[0].error if self._ends else None

    @property
    def done(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return bool(self._ends)

    @property
    def logprobs(self) -> list[Any]:
        """Of each token of the answer, where its `Sampling` asks for them."""
        return self._logprobs[: len(self.answer)]

    @property
    def cached_tokens(self) -> int:
        """Tokens of its prompt found in the prefix cache when it first joined."""
        return self.place.cached_tokens or 0

    @property
    def reused(self) -> int:
        """Tokens found there when it last joined, including answered ones after a preemption."""
        return self.place.reused

    @property
    def preempted(self) -> int:
        """How often it was preempted."""
        return self.place.preempted

    @property
    def row(self) -> int | None:
        return self.place.row

    @property
    def pages(self) -> tuple[int, ...]:
        return self.place.pages

    @property
    def computed(self) -> int:
        """How many of its tokens need not be computed (again): never the last, whose successor is wanted."""
        return min(self.place.computed, self.length - 1)

    @property
    def missing(self) -> int:
        """Tokens to compute."""
        return self.length - self.computed

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.answer)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.answer)

    def between(self, start: int, end: int) -> Sequence[int]:
        """Tokens [start, end)."""
        if start < len(self.prompt):
            return self.prompt[start:end] if end <= len(self.prompt) else self.tokens[start:end]
        return self.answer[start - len(self.prompt) : end - len(self.prompt)]

    def grow(self, tokens: Sequence[int], logprobs: Sequence[Any] = ()) -> None:
        """Extends the answer, atomically and last. Anything else that an interrupt leaves behind is ignored and
        overwritten by the next attempt."""
        self._logprobs[len(self.answer) :] = logprobs
        self.answer.extend(tokens)

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """Marks it as done, unless it already is."""
        self._ends.append(End(reason, error))
