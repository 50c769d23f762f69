"""A radix tree of pages of 16 tokens per scope. Pure, without a clock.

A page is found only after all pages before it. Parents count as used after children, so the least recently used page
always ends its branch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from tandem.runners.pages import PAGE

Tokens = tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Node:
    """A page of 16 tokens after its parents' tokens. A scope's root has no page."""

    tokens: Tokens
    parent: _Node | None
    page: int = -1
    scope: Hashable = None
    children: dict[Tokens, _Node] = field(default_factory=dict)


class PrefixTree:
    """The pages of token sequences, numbered 0 to `count` - 1. Its length: pages in use."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.evicted = 0
        self._freed: list[int] = []
        self._roots: dict[Hashable, _Node] = {}
        self._by_use: OrderedDict[_Node, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._by_use)

    @property
    def scopes(self) -> list[Hashable]:
        return list(self._roots)

    def match(self, scope: Hashable, tokens: Sequence[int]) -> list[int]:
        """The pages of the longest cached prefix, in order; marks them as used."""
        path = self._path(scope, tokens)
        self._use(path)
        return [node.page for node in path]

    def extend(self, scope: Hashable, tokens: Sequence[int]) -> tuple[int, list[int]]:
        """Adds whole pages of `tokens`, as far as others are free; returns how many existed, and those to be filled."""
        path = self._path(scope, tokens)
        known, added = len(path), list[int]()
        self._use(path)
        for part in _parts(tokens[known * PAGE :]):
            page = self._page(len(path))
            if page is None:
                break
            parent = path[-1] if path else self._roots.setdefault(scope, _Node((), None, scope=scope))
            node = parent.children[part] = _Node(part, parent, page, scope)
            self._by_use[node] = None
            path.append(node)
            added.append(page)
        self._use(path)
        return known, added

    def remove(self, scope: Hashable, tokens: Sequence[int]) -> None:
        """Removes the first page of `tokens` and all pages after it, in any sequence."""
        if path := self._path(scope, tokens):
            for node in _below(path[0]):
                self._drop(node)

    def clear(self) -> None:
        while self._by_use:
            self._drop(next(iter(self._by_use)))

    def _path(self, scope: Hashable, tokens: Sequence[int]) -> list[_Node]:
        path: list[_Node] = []
        node = self._roots.get(scope)
        for part in _parts(tokens):
            node = node.children.get(part) if node else None
            if node is None:
                break
            path.append(node)
        return path

    def _use(self, path: Sequence[_Node]) -> None:
        for node in reversed(path):
            self._by_use.move_to_end(node)

    def _page(self, kept: int) -> int | None:
        """A free or least recently used page; None if only the last `kept` used are left."""
        used = len(self._by_use)
        if not self._freed and used < self.count:
            return used  # none was freed, so these are the first ones
        if not self._freed and used > kept:
            self._drop(next(iter(self._by_use)))
            self.evicted += 1
        return self._freed.pop() if self._freed else None

    def _drop(self, node: _Node) -> None:
        del self._by_use[node]
        self._freed.append(node.page)
        parent = node.parent
        assert parent is not None and not node.children
        del parent.children[node.tokens]
        if parent.parent is None and not parent.children:
            del self._roots[node.scope]


def _parts(tokens: Sequence[int]) -> Iterator[Tokens]:
    return (tuple(tokens[at : at + PAGE]) for at in range(0, len(tokens) - PAGE + 1, PAGE))


def _below(node: _Node) -> list[_Node]:
    """The node and its descendants, children before parents."""
    found, waiting = list[_Node](), [node]
    while waiting:
        found.append(waiting.pop())
        waiting += found[-1].children.values()
    return found[::-1]
