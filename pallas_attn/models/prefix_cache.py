"""Pages found again by what they hold: equal prefixes of token ids share pages.

A tree. A node is a page, its edge the page's tokens, so a path from the root is a prefix; equal tokens after another
prefix are another node, since keys and values depend on everything before them. Tokens themselves are the keys, not a
hash of them: what is found is equal.

Only full pages are remembered and found. A partly matching page could be copied; but in an 8-bit cache its tokens were
rounded with a scale that depends on the page's other tokens, so results would depend on earlier requests.

The tree holds one reference to each of its pages. Pages that nobody else holds are given back when the allocator runs
out, least recently used first, leaves before what they hang on.

The tree alone is the truth: nodes join and leave it atomically. The order of use and the references follow from it and
are rebuilt after an interrupt (`restore`).
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


class PrefixCache:
    """The tree, over the pages of one allocator."""

    def __init__(self, allocator: PageAllocator, page_size: int):
        self._allocator, self._page_size = allocator, page_size
        self._root = _Node((), -1, None)
        # Every node, least recently used first.
        self._nodes: OrderedDict[_Node, None] = OrderedDict()

    @property
    def num_pages(self) -> int:
        return len(self._nodes)

    @property
    def pages(self) -> list[int]:
        """Number of remembered pages."""
        return [node.page for node in self._nodes]

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Pages of the longest known prefix of `tokens`, read-only; the caller gets a reference to each."""
        size, node, pages = self._page_size, self._root, []
        while child := node.children.get(tuple(tokens[len(pages) * size : (len(pages) + 1) * size])):
            node = child
            pages.append(node.page)
        self._touch(node)
        return self._allocator.share(pages)

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Remembers that `pages` hold `tokens`, for full pages. Known prefixes stay as they are."""
        size, node, new = self._page_size, self._root, []
        for index, page in enumerate(pages[: len(tokens) // size]):
            held = tuple(tokens[index * size : (index + 1) * size])
            if held not in node.children:
                node.children[held] = _Node(held, page, node)
                new.append(page)
            node = node.children[held]
        self._allocator.share(new)
        self._touch(node)

    def evict(self, wanted: int) -> int:
        """Frees up to `wanted` pages that nobody else holds; returns how many."""
        leaves, left = [], Counter[_Node | None]()
        # Freeing a leaf may make its parent a leaf, which was used no earlier: one pass finds all.
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

    def forget(self) -> None:
        """Forgets everything, without touching references; `PageAllocator.restore` follows."""
        self._root = _Node((), -1, None)
        self._nodes = OrderedDict()

    def restore(self) -> None:
        """After an interrupt: rebuilds the order of use from the nodes that exist."""
        nodes, found = {}, [self._root]
        while found:
            children = found.pop().children.values()
            nodes |= dict.fromkeys(children)
            found += children
        known = [node for node in self._nodes if node in nodes]
        self._nodes = OrderedDict.fromkeys([*known, *nodes])

    def _forget(self, nodes: Sequence[_Node]) -> None:
        for node in nodes:
            assert node.parent is not None
            del node.parent.children[node.tokens], self._nodes[node]
        self._allocator.free([node.page for node in nodes])

    def _touch(self, node: _Node | None) -> None:
        """Marks a node as just used, and its ancestors after it."""
        while node is not None and node is not self._root:
            self._nodes[node] = None
            self._nodes.move_to_end(node)
            node = node.parent
