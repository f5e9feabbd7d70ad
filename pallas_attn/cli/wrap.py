"""Wraps text that arrives in pieces between words, at the terminal's width."""

import re
from collections.abc import Callable

from rich.cells import cell_len

_TAB = 8
# The end of a line, space between two words, or a character of one.
_PARTS = re.compile(r"\n|[^\S\n]+|\S")


class Wrapped:
    """The text that can be shown so far, with line breaks for spaces where a word would not fit.

    A word is held back until it ends or is as long as a line; longer ones are broken by the terminal. Lines may break
    before and after characters two columns wide, as in Chinese. Spaces at the beginning of a line stay.

    Args:
        width: columns of the terminal, which may change.
    """

    def __init__(self, width: Callable[[], int]):
        self._width = width
        self._column = 0
        self._spaces, self._word = "", ""
        self._long = False  # in a word that is

    def shown(self, piece: str) -> str:
        return "".join(map(self._next, _PARTS.findall(piece)))

    def rest(self) -> str:
        """The rest, at the end."""
        return self._end_word()

    def _next(self, part: str) -> str:
        if part.isspace():
            ended, self._long = self._end_word(), False
            if part == "\n":
                self._spaces, self._column = "", 0
                return ended + part
            self._spaces += part
            return ended
        if self._long:
            self._column = (self._column + cell_len(part) - 1) % self._width() + 1
            return part
        wide = cell_len(part) > 1
        ended = self._end_word() if wide else ""
        self._word += part
        self._long = cell_len(self._word) >= self._width()
        return ended + (self._end_word() if wide or self._long else "")

    def _end_word(self) -> str:
        if not self._word:
            return ""
        spaces, word, self._spaces, self._word = self._spaces, self._word, "", ""
        begins = self._column + _cells(spaces, self._column)
        if self._column and begins + cell_len(word) > self._width():
            spaces, begins = "\n", 0
        self._column = (begins + cell_len(word) - 1) % self._width() + 1
        return spaces + word


def _cells(spaces: str, column: int) -> int:
    """Columns that they take from `column` on."""
    start = column
    for space in spaces:
        column += _TAB - column % _TAB if space == "\t" else cell_len(space)
    return column - start
