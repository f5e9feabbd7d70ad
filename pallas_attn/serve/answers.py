"""Answers in the format of OpenAI's API: whole, and as events."""

import abc
import time
import uuid
from collections.abc import Sequence
from typing import Any

from .asked import Asked
from .text import AnswerText, Piece, TokenText
from .tool_calls import ToolCalls
from .worker import Job


class Choice:
    """One of several answers, read from its job as it progresses."""

    def __init__(self, index: int, job: Job, text: AnswerText, tools: frozenset[str]):
        self.index, self.job = index, job
        self._text, self._calls = text, ToolCalls(tools) if tools else None
        self._read = 0
        self.ended = False

    def read(self) -> Piece:
        """The new part, up to the end once the job is done."""
        tokens, logprobs = self.job.tokens(self._read), self.job.logprobs(self._read)
        self._read += len(tokens)
        piece = self._text.add(tokens, logprobs)
        if not self.job.done:
            return self._without_calls(piece)
        self.ended = True
        rest = self._text.end()
        piece = self._without_calls(Piece(piece.text + rest.text, piece.tokens + rest.tokens))
        return piece if self._calls is None else Piece(piece.text + self._calls.rest(), piece.tokens)

    def _without_calls(self, piece: Piece) -> Piece:
        return piece if self._calls is None else Piece(self._calls.shown(piece.text), piece.tokens)

    @property
    def calls(self) -> list[dict[str, Any]]:
        return self._calls.calls if self._calls else []

    @property
    def finish_reason(self) -> str:
        if self.calls:
            return "tool_calls"
        return "stop" if self._text.ended else self.job.finish_reason or "stop"


class Answer(abc.ABC):
    """What both kinds of answers share; a kind defines the form of a choice."""

    name, kind, chunk_kind = "", "", ""

    def __init__(self, model: str, asked: Asked, choices: Sequence[Choice]):
        self.asked, self.choices = asked, choices
        self._about = {"id": f"{self.name}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self) -> dict[str, Any]:
        """The whole answer, from finished jobs."""
        choices = [self._whole(choice, choice.read()) for choice in self.choices]
        return {**self._about, "object": self.kind, "choices": choices, "usage": self._usage()}

    def opening(self) -> list[dict[str, Any]]:
        """Events before the first token."""
        return []

    def news(self, choice: Choice) -> list[dict[str, Any]]:
        """Events for the new part of a choice."""
        known = len(choice.calls)
        piece = choice.read()
        events = []
        if piece.text or piece.tokens:
            events.append(self._event(choice.index, self._piece(piece), self._logprobs(piece)))
        events += [self._event(choice.index, delta) for delta in self._call_deltas(choice, known)]
        if choice.ended:
            events.append(self._event(choice.index, self._piece(None), reason=choice.finish_reason))
        return events

    def closing(self) -> list[dict[str, Any]]:
        """Events after the last."""
        if not self.asked.include_usage:
            return []
        return [{**self._about, "object": self.chunk_kind, "choices": [], "usage": self._usage()}]

    def _usage(self) -> dict[str, Any]:
        answered = sum(choice.job.count for choice in self.choices)
        prompt = sum(map(len, self.asked.prompts))
        # The first of several answers to a prompt computes the prompt, and the others find it cached.
        first = self.choices[:: self.asked.sampling.n]
        cached = sum(choice.job.cached_tokens for choice in first)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answered,
            "total_tokens": prompt + answered,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _event(
        self, index: int, said: dict[str, Any], logprobs: Any = None, reason: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}
        event = {**self._about, "object": self.chunk_kind, "choices": [choice]}
        return {**event, "usage": None} if self.asked.include_usage else event

    @abc.abstractmethod
    def _whole(self, choice: Choice, piece: Piece) -> dict[str, Any]: ...

    @abc.abstractmethod
    def _piece(self, piece: Piece | None) -> dict[str, Any]: ...

    @abc.abstractmethod
    def _logprobs(self, piece: Piece) -> dict[str, Any] | None: ...

    def _call_deltas(self, choice: Choice, known: int) -> list[dict[str, Any]]:
        return []


class Completion(Answer):
    name, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def _whole(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        reason = choice.finish_reason
        return {
            "index": choice.index,
            "text": piece.text,
            "logprobs": self._logprobs(piece),
            "finish_reason": reason,
        }

    def _piece(self, piece: Piece | None) -> dict[str, Any]:
        return {"text": piece.text if piece else ""}

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if self.asked.sampling.logprobs is None:
            return None
        return {
            "tokens": [token.text for token in piece.tokens],
            "token_logprobs": [token.logprob for token in piece.tokens],
            "top_logprobs": [dict(reversed(token.top)) for token in piece.tokens],
            "text_offset": [token.offset for token in piece.tokens],
        }


class ChatCompletion(Answer):
    name, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        said = {"delta": {"role": "assistant", "content": ""}}
        return [self._event(choice.index, said) for choice in self.choices]

    def _whole(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.text}
        if choice.calls:
            message |= {"content": piece.text or None, "tool_calls": choice.calls}
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(piece),
            "finish_reason": choice.finish_reason,
        }

    def _piece(self, piece: Piece | None) -> dict[str, Any]:
        return {"delta": {"content": piece.text} if piece else {}}

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if self.asked.sampling.logprobs is None:
            return None
        return {"content": [_described(token) for token in piece.tokens]}

    def _call_deltas(self, choice: Choice, known: int) -> list[dict[str, Any]]:
        new = list(enumerate(choice.calls))[known:]
        return [{"delta": {"tool_calls": [{"index": index, **call}]}} for index, call in new]


def _described(token: TokenText) -> dict[str, Any]:
    top = [_spelled(text, logprob) for text, logprob in token.top]
    return {**_spelled(token.text, token.logprob), "top_logprobs": top}


def _spelled(text: str, logprob: float) -> dict[str, Any]:
    # The bytes of a partial character are no longer known.
    spelled = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": spelled}
