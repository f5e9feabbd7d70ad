"""Texts that end an answer, searched for as its tokens arrive."""

from collections.abc import Callable, Sequence

from .detokenizer import UNKNOWN

# The most bytes of a character, each of which may be a token.
_TOKENS_PER_CHARACTER = 4


def first_stop(
    decode: Callable[[Sequence[int]], str], before: Sequence[int], new: Sequence[int], stops: Sequence[str]
) -> int | None:
    """How many of the `new` tokens there are up to the first that completes a stop text; None if none does."""
    if not stops:
        return None
    window = _TOKENS_PER_CHARACTER * max(map(len, stops)) + 1
    tokens = [*before[-window:], *new]
    # Usually there is none, which a single check of all tokens shows, unless they end within a character: some decoders
    # then hide the characters before it.
    text = decode(tokens)
    if UNKNOWN not in text and not _any_in(text, stops):
        return None
    start = len(tokens) - len(new)
    for count in range(1, len(new) + 1):
        text = decode(tokens[max(0, start + count - window) : start + count])
        if _any_in(text, stops):
            return count
    return None


def _any_in(text: str, stops: Sequence[str]) -> bool:
    return any(stop in text for stop in stops)


class Held:
    """Passes on text, holding back what may be the beginning of a stop text."""

    def __init__(self, stops: Sequence[str]):
        self._stops, self._text = stops, ""
        self.ended = False

    def shown(self, piece: str) -> str:
        """The text that can be shown so far; nothing after a stop text."""
        if self.ended:
            return ""
        self._text += piece
        ends = [found for stop in self._stops if (found := self._text.find(stop)) >= 0]
        if ends:
            self.ended, count = True, min(ends)
        else:
            count = len(self._text) - max((beginning(self._text, stop) for stop in self._stops), default=0)
        shown, self._text = self._text[:count], self._text[count:]
        return shown

    def rest(self) -> str:
        """The rest, at the end."""
        return "" if self.ended else self._text


def beginning(text: str, of: str) -> int:
    """Number of characters at the end of `text` that `of` begins with."""
    most = min(len(of) - 1, len(text))
    return next((n for n in range(most, 0, -1) if text.endswith(of[:n])), 0)
