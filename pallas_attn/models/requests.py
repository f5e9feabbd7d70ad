"""A request: what is asked, what was answered so far, why it ended, and where it lies while it runs.

These few fields are all that serving has to know. What else a scheduler and an engine keep (free pages, owners of
pages, rows of the block table) follows from them, and is made anew after an exception in the middle of something. So
each of them changes at one stroke: an interrupt finds it as it was or as it is to be.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

FinishReason = Literal["stop", "length", "cancelled", "error"]


class Place(NamedTuple):
    """Where a request lies, and how it came there. Never changed, but replaced by another."""

    row: int | None = None
    """Of the block table while it runs, else None."""
    pages: tuple[int, ...] = ()
    computed: int = 0
    """How many of its tokens have keys and values in `pages`."""
    reused: int = 0
    cached_tokens: int | None = None
    """None until it has joined."""
    preempted: int = 0

    # `_replace` takes twice as long, and this is done for every row of every step.
    def with_pages(self, more: Sequence[int]) -> "Place":
        return Place(self.row, (*self.pages, *more), *self[2:])

    def with_computed(self, computed: int) -> "Place":
        return Place(self.row, self.pages, computed, *self[3:])

    def left(self, preempted: int = 0) -> "Place":
        """Without row and pages."""
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
    # The first counts. Several threads may end a request at the same time: appending to a list needs no lock.
    _ends: list[End] = dataclasses.field(default_factory=list, repr=False)

    @property
    def finish_reason(self) -> FinishReason | None:
        """None while it waits or runs. Then "stop": a stop token, which is the answer's last, or a stop text, which its
        last token completes; "length": it has `max_new_tokens`; "cancelled"; or "error": see `error`."""
        return self._ends[0].reason if self._ends else None

    @property
    def error(self) -> str | None:
        """One line, where that is what ended it."""
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
        """How many tokens of its prompt were found in the prefix cache, when it first joined."""
        return self.place.cached_tokens or 0

    @property
    def reused(self) -> int:
        """How many of its tokens were found there when it last joined: of a request that was sent back, answered ones
        too."""
        return self.place.reused

    @property
    def preempted(self) -> int:
        """How often it was sent back."""
        return self.place.preempted

    @property
    def row(self) -> int | None:
        return self.place.row

    @property
    def pages(self) -> tuple[int, ...]:
        return self.place.pages

    @property
    def computed(self) -> int:
        """How many of its tokens need not be computed (again). The last one is in any case: its successor is asked for,
        also where an earlier step was to tell and was given up."""
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
        """Goes on with its answer, which itself comes last and at one stroke. What an interrupt has left of the rest
        counts for nothing, and the next attempt writes over it."""
        self._logprobs[len(self.answer) :] = logprobs
        self.answer.extend(tokens)

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """From now on it is done, if it was not before."""
        self._ends.append(End(reason, error))
