"""The text of an answer, from its tokens as they arrive."""

import dataclasses
from collections.abc import Sequence

from pallas_attn.models import Sampling, Tokenizer, TokenLogprobs
from pallas_attn.models.detokenizer import UNKNOWN, Detokenizer
from pallas_attn.models.stopping import Held


@dataclasses.dataclass(frozen=True)
class TokenText:
    """A token of an answer, for log-probabilities.

    text: what it adds to the text; the replacement character for a partial one.
    offset: characters of the answer before it.
    logprob, top: log-probabilities of the token and of the likeliest ones.
    """

    text: str
    offset: int
    logprob: float
    top: tuple[tuple[str, float], ...]


@dataclasses.dataclass(frozen=True)
class Piece:
    text: str = ""
    tokens: tuple[TokenText, ...] = ()


class AnswerText:
    """An answer's text without its stop text, in pieces of whole characters.

    Args:
        tokenizer: of the model.
        sampling: the answer's, for its stop texts and log-probabilities.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: Sampling):
        self._tokenizer = tokenizer
        self._ends = {*tokenizer.stop_token_ids, *sampling.stop_token_ids}
        self._detokenizer, self._held = Detokenizer(tokenizer.decode), Held(sampling.stop)
        self._described = sampling.logprobs is not None
        self._decoded = self._shown = 0  # characters
        self._before: tuple[int, ...] = ()  # the token in front
        self._waiting: list[TokenText] = []  # of which nothing was shown yet

    @property
    def ended(self) -> bool:
        """Whether a stop text was found."""
        return self._held.ended

    def add(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Piece:
        if not self._described:
            return Piece(self._held.shown(self._detokenizer.add(tokens)))
        text = ""
        for token, logs in zip(tokens, logprobs, strict=True):
            if token not in self._ends:
                top = tuple((self._text_of(likely), logprob) for likely, logprob in logs.top)
                self._waiting.append(TokenText(self._text_of(token), self._decoded, logs.logprob, top))
            text += (new := self._detokenizer.add([token]))
            self._decoded += len(new)
            self._before = (token,)
        return self._piece(self._held.shown(text))

    def end(self) -> Piece:
        """The text held back, once the answer has ended."""
        text = self._held.shown(self._detokenizer.rest())
        return self._piece(text + self._held.rest())

    def _piece(self, text: str) -> Piece:
        self._shown += len(text)
        begun = [token for token in self._waiting if token.offset < self._shown]
        self._waiting = self._waiting[len(begun) :]
        return Piece(text, tuple(begun))

    def _text_of(self, token: int) -> str:
        decode = self._tokenizer.decode
        before = decode(self._before) if self._before else ""
        if not before or before.endswith(UNKNOWN):
            return decode([token], skip_special_tokens=False)
        return decode([*self._before, token], skip_special_tokens=False)[len(before) :]
