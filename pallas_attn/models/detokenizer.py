"""The text of tokens as they come."""

from collections.abc import Callable, Sequence

UNKNOWN = "\ufffd"
"""Stands for bytes that are not UTF-8."""
# The most tokens without valid text that are held back.
_MOST_HELD = 64


class Detokenizer:
    """Tokens to text, held back while a character is incomplete.

    Each piece is decoded together with the one before it: decoders may drop a space at the beginning of their input.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._before: list[int] = []
        self._piece: list[int] = []

    def add(self, tokens: Sequence[int]) -> str:
        text = self._behind([*self._piece, *tokens])
        # A replacement character at the end may be an incomplete character.
        incomplete = text.endswith(UNKNOWN)
        if incomplete and len(tokens) > 1:
            return "".join([self.add([token]) for token in tokens])
        self._piece += tokens
        if incomplete and len(self._piece) < _MOST_HELD:
            return ""
        # A piece without text cannot serve as the one before: a space after it would be dropped.
        self._before = self._piece if text else [*self._before, *self._piece]
        self._piece = []
        return text

    def rest(self) -> str:
        """The text held back so far."""
        return self._behind(self._piece)

    def _behind(self, tokens: list[int]) -> str:
        return self._decode([*self._before, *tokens])[len(self._decode(self._before)) :]
