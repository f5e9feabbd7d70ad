"""What an engine has done and is doing: for logs and metrics."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import NamedTuple, get_args

from .requests import FinishReason, Request


class Totals(NamedTuple):
    """Sums over requests. Each request counts its own, so that nothing is counted twice."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    finished: Mapping[FinishReason, int] = dict.fromkeys(get_args(FinishReason), 0)

    def plus(self, requests: Collection[Request]) -> "Totals":
        joined = [request for request in requests if request.place.cached_tokens is not None]
        reasons = [request.finish_reason for request in requests]
        return Totals(
            self.prompt_tokens + sum(len(request.prompt) for request in joined),
            self.cached_tokens + sum(request.cached_tokens for request in joined),
            self.generated_tokens + sum(len(request.answer) for request in joined),
            self.preemptions + sum(request.preempted for request in joined),
            {reason: self.finished[reason] + reasons.count(reason) for reason in self.finished},
        )


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """Where an engine stands. Tokens, requests, preemptions, steps and seconds are sums since it was made.

    Attributes:
        waiting, running: requests.
        pages: of the cache, in each layer.
        free_pages: that neither a request nor the prefix cache holds.
        cached_pages: that the prefix cache remembers, requests that run included.
        prompt_tokens: of requests that have joined.
        cached_tokens: of these, found in the prefix cache.
        generated_tokens: of answers.
        finished: requests that have ended, by `Request.finish_reason`.
        preemptions: how often a request was sent back for want of pages.
        steps: made so far.
        compile_seconds: spent compiling.
    """

    waiting: int
    running: int
    pages: int
    free_pages: int
    cached_pages: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    finished: Mapping[FinishReason, int]
    preemptions: int
    steps: int
    compile_seconds: float
