"""The text of tokens as they come."""

from collections.abc import Callable, Sequence

UNKNOWN = "\ufffd"
"""What bytes that are no UTF-8 become."""
# So many tokens of bytes that are no text are waited for.
_MOST_HELD = 64


class Detokenizer:
    """Tokens to text, held back while a character is incomplete.

    A piece is decoded behind the piece before it: decoders may drop a space at the beginning of what they are given.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._before: list[int] = []
        self._piece: list[int] = []

    def add(self, tokens: Sequence[int]) -> str:
        text = self._behind([*self._piece, *tokens])
        # A replacement character at the end may be one whose other bytes are still to come.
        incomplete = text.endswith(UNKNOWN)
        if incomplete and len(tokens) > 1:
            return "".join([self.add([token]) for token in tokens])
        self._piece += tokens
        if incomplete and len(self._piece) < _MOST_HELD:
            return ""
        # What has no text is no neighbour: a space behind it would be dropped as if it were the first.
        self._before = self._piece if text else [*self._before, *self._piece]
        self._piece = []
        return text

    def rest(self) -> str:
        """What is held back, as it stands."""
        return self._behind(self._piece)

    def _behind(self, tokens: list[int]) -> str:
        return self._decode([*self._before, *tokens])[len(self._decode(self._before)) :]
