"""What `PageAllocator` says of arguments that are no page ids; how it deals pages out is in test_kv_cache.py."""

import re

import pytest
from support import unchecked

from pallas_attn import PageAllocator


@pytest.mark.parametrize("method", ["free", "share"])
@pytest.mark.parametrize(
    ("pages", "error", "message"),
    [
        (0, TypeError, "expected page ids, got 0 of type int"),
        (["0"], TypeError, "expected an int, got '0' of type str"),
        ([0, 4], ValueError, "expected ids in [0, 4), got 4"),
        ([0, 1], ValueError, "expected pages in use, got page 1 1 time(s) with 0 reference(s)"),
    ],
)
def test_pages_that_are_none_are_refused_and_nothing_changes(method, pages, error, message):
    allocator = PageAllocator(4)
    allocator.allocate(1)
    with pytest.raises(error, match=re.escape(f"PageAllocator.{method}: argument 'pages': {message}")):
        unchecked(getattr(PageAllocator, method))(allocator, pages)
    assert [allocator.references(page) for page in range(4)] == [1, 0, 0, 0]


def test_references_are_made_anew_from_what_is_held():
    allocator = PageAllocator(4)
    allocator.allocate(3)
    allocator.restore([2, 0, 2])
    assert [allocator.references(page) for page in range(4)] == [1, 0, 2, 0]
    assert sorted(allocator.allocate(2)) == [1, 3]
    with pytest.raises(
        ValueError, match=r"PageAllocator.restore: argument 'pages': expected ids in \[0, 4\)"
    ):
        allocator.restore([4])
    assert allocator.num_free == 0
