"""Page bookkeeping on the host: which pages are free, and how many sequences use each of the others."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from pallas_attn._call.checks import check_int, fail


class OutOfPagesError(RuntimeError):
    """More pages were asked for than are free. Nothing was allocated."""


class PageAllocator:
    """Hands out page ids of a pool of `num_pages` pages, with reference counts for shared prefixes.

    Last freed, first reused: those pages are the likeliest to be in a cache. Every method either succeeds or raises and
    changes nothing.
    """

    def __init__(self, num_pages: int):
        check_int("PageAllocator", "num_pages", num_pages, least=1)
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def references(self, page: int) -> int:
        """Number of owners of a page; 0 when it is free."""
        self._check_ids("references", [page])
        return self._references[page]

    def allocate(self, n: int) -> list[int]:
        """`n` pages with one reference each. Raises OutOfPagesError when fewer are free."""
        check_int("PageAllocator.allocate", "n", n, least=0)
        if n > len(self._free):
            raise OutOfPagesError(
                f"PageAllocator.allocate: argument 'n': expected at most {len(self._free)} pages "
                f"(free, of {self.num_pages}), got {n}"
            )
        pages = [self._free.pop() for _ in range(n)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> list[int]:
        """Adds a reference to each page, for another sequence with the same prefix. Returns the pages."""
        pages = self._checked_list("share", pages)
        for page in pages:
            self._references[page] += 1
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Drops one reference from each page; a page without references is free again."""
        pages = self._checked_list("free", pages)
        for page in pages:
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def restore(self, held: Iterable[int]) -> None:
        """Resets the references: one for each time that `held` names a page.

        For hosts that know who holds which pages, after an interrupt in the middle of another method.
        """
        held = list(held)
        self._check_ids("restore", held)
        times = Counter(held)
        self._references = [times[page] for page in range(self.num_pages)]
        self._free = [page for page in range(self.num_pages - 1, -1, -1) if not times[page]]

    def _check_ids(self, method: str, pages: list[Any]) -> None:
        for page in pages:
            check_int(f"PageAllocator.{method}", "pages", page)
            if not 0 <= page < self.num_pages:
                fail(f"PageAllocator.{method}", "pages", f"ids in [0, {self.num_pages})", str(page))

    def _checked_list(self, method: str, pages: Any) -> list[int]:
        """Checks that pages are in use and, where that matters, named no more often than they have references."""
        if not isinstance(pages, Iterable):
            got = f"{pages!r} of type {type(pages).__name__}"
            fail(f"PageAllocator.{method}", "pages", "page ids", got, TypeError)
        pages = list(pages)
        self._check_ids(method, pages)
        for page, times in Counter(pages).items():
            held = self._references[page]
            if held == 0 or (method == "free" and times > held):
                got = f"page {page} {times} time(s) with {held} reference(s)"
                fail(f"PageAllocator.{method}", "pages", "pages in use", got)
        return pages
