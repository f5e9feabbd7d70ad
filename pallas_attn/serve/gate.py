"""Admission: requests up to a number of answers, and none once the server stops."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from .errors import ApiError

_RETRY = {"retry-after": "1"}


class Gate:
    """Counts the answers of admitted requests.

    Args:
        most: the most answers at once.

    Attributes:
        inside: current answers.
        closed: whether no more requests are admitted.
    """

    def __init__(self, most: int):
        self._most = most
        self.inside, self.closed = 0, False
        self._empty = asyncio.Event()
        self._empty.set()

    def close(self) -> None:
        """Admits no more requests."""
        self.closed = True

    async def emptied(self) -> None:
        """Waits for admitted requests to finish."""
        await self._empty.wait()

    @contextlib.contextmanager
    def entered(self) -> Iterator[Callable[[int], None]]:
        """Counts one answer while the body runs, or as many as its value is called with. Raises ApiError (503) if that
        exceeds the limit."""
        if self.closed:
            raise ApiError(503, "the server is stopping", code="stopping", headers=_RETRY)
        taken = 0

        def take(count: int) -> None:
            nonlocal taken
            if self.inside - taken + count > self._most:
                message = f"{self.inside} answers are being made or waited for, and no more fit: try again"
                raise ApiError(503, message, code="queue_full", headers=_RETRY)
            self.inside += count - taken
            taken = count
            self._empty.clear()

        take(1)
        try:
            yield take
        finally:
            self.inside -= taken
            if not self.inside:
                self._empty.set()
