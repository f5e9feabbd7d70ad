"""Pages found again by what they hold: equal prefixes of token ids share pages.

A tree. A node is a page, its edge the page's tokens, so a path from the root is a prefix; equal tokens after another
prefix are another node, since keys and values depend on everything before them. Tokens themselves are the keys, not a
hash of them: what is found is equal. A page that is not full is a leaf: others copy it and go on in their copy.

The tree holds one reference to each of its pages. Pages that nobody else holds are given back when the allocator runs
out, least recently used first, leaves before what they hang on.
"""

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Sequence

from pallas_attn import PageAllocator


@dataclasses.dataclass(eq=False)
class _Node:
    tokens: tuple[int, ...]
    page: int
    parent: "_Node | None"
    children: dict[tuple[int, ...], "_Node"] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Match:
    """What is known of a sequence's beginning; the holder has a reference to each of the pages.

    shared: full pages, to be read and never written.
    partial: a page to be copied before the sequence goes on in the copy, and how many of its tokens are the sequence's.
    """

    shared: list[int]
    partial: tuple[int, int] | None

    @property
    def pages(self) -> list[int]:
        return [*self.shared, *([self.partial[0]] if self.partial else [])]


class PrefixCache:
    """The tree, over the pages of one allocator."""

    def __init__(self, allocator: PageAllocator, page_size: int):
        self._allocator, self._page_size = allocator, page_size
        self._root = _Node((), -1, None)
        # Every node, least recently used first.
        self._nodes: OrderedDict[_Node, None] = OrderedDict()

    @property
    def pages(self) -> list[int]:
        """All that are remembered."""
        return [node.page for node in self._nodes]

    def match(self, tokens: Sequence[int]) -> Match:
        """The longest known beginning of `tokens`."""
        size, node, shared, first = self._page_size, self._root, [], 0
        while (child := node.children.get(tuple(tokens[first : first + size]))) and len(child.tokens) == size:
            node, first = child, first + size
            shared.append(node.page)
        best, common = None, 0
        for child in node.children.values():
            equal = _common(child.tokens, tokens[first : first + size])
            if equal > common:
                best, common = child, equal
        self._touch(best or node)
        match = Match(shared, (best.page, common) if best else None)
        self._allocator.share(match.pages)
        return match

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """`pages` hold `tokens`, as far as there are tokens. What is known already stays as it is."""
        size, node, new = self._page_size, self._root, []
        for index, page in enumerate(pages):
            held = tuple(tokens[index * size : (index + 1) * size])
            if not held:
                break
            if held not in node.children:
                node.children[held] = _Node(held, page, node)
                new.append(page)
            node = node.children[held]
        self._allocator.share(new)
        self._touch(node)

    def evict(self, wanted: int) -> int:
        """Gives back up to `wanted` pages that nobody else holds; how many there were."""
        leaves, left = [], Counter[_Node | None]()
        # Giving a leaf back may make a leaf of what it hung on, which was used no earlier: one pass finds them all.
        for node in self._nodes:
            if len(leaves) >= wanted:
                break
            if len(node.children) == left[node] and self._allocator.references(node.page) == 1:
                leaves.append(node)
                left[node.parent] += 1
        self._forget(leaves)
        return len(leaves)

    def clear(self) -> None:
        """Forgets everything."""
        self._forget(list(self._nodes))

    def _forget(self, nodes: Sequence[_Node]) -> None:
        for node in nodes:
            assert node.parent is not None
            del node.parent.children[node.tokens], self._nodes[node]
        self._allocator.free([node.page for node in nodes])

    def _touch(self, node: _Node | None) -> None:
        """Used just now, and all that it hangs on a moment later."""
        while node is not None and node is not self._root:
            self._nodes[node] = None
            self._nodes.move_to_end(node)
            node = node.parent


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    equal = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        equal += 1
    return equal
