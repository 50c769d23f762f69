"""Holds the drafts that may continue a session's committed tokens, at a verifier that never waits for one.

They form a trie whose root is the last committed token. Drafts come late: part of one may be committed already when it
arrives, and what does not continue exactly what is committed is dropped. The store holds a bounded number of tokens,
whatever is sent to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_NODES = 256
"""Tokens that a store holds, in all its drafts; also the most that one message may bring."""


@dataclass(slots=True)
class _Node:
    """A drafted token, with those that may follow it. `stamp` tells how recently a draft led through it."""

    stamp: int = 0
    after: dict[int, _Node] = field(default_factory=dict)


class DraftStore:
    """The drafts of one session. The newest draft that fits is the best: its drafter knew most tokens."""

    def __init__(self, tokens: Sequence[int], most_nodes: int = MAX_NODES) -> None:
        if most_nodes < 1:
            raise ValueError(f"draft store: it must hold at least 1 token, not {most_nodes}")
        self.committed = list(tokens)
        self._most = most_nodes
        self._root = _Node()
        self._stamps = itertools.count(1)
        self._nodes = 0

    def __len__(self) -> int:
        return self._nodes

    def add(self, base: int, last: int, draft: tuple[int, ...]) -> bool:
        """Stores what continues the committed tokens of a draft that begins after `base` tokens ending in `last`.

        Returns False if it begins after other tokens.
        """
        if not 1 <= base <= len(self.committed) or self.committed[base - 1] != last:
            return False
        late = tuple(self.committed[base:])
        if draft[: len(late)] == late:
            self._insert(draft[len(late) :], next(self._stamps))
        return True

    def _insert(self, path: Sequence[int], stamp: int) -> None:
        """Inserts a path. If there is no room, older drafts go first, then the path's end."""
        node = self._root
        for token in path:
            if token not in node.after:
                if self._nodes >= self._most:
                    self._nodes -= _drop_older(self._root, stamp)
                if self._nodes >= self._most:
                    return
                node.after[token] = _Node()
                self._nodes += 1
            node = node.after[token]
            node.stamp = stamp

    def advance(self, token_ids: Sequence[int]) -> None:
        """Follows newly committed tokens; drafts that they contradict are dropped."""
        self.committed += token_ids
        for token in token_ids if self._nodes else ():
            self._root = self._root.after.get(token) or _Node()
        self._nodes = _size(self._root)

    def best(self, most: int) -> tuple[int, ...]:
        """Returns at most `most` drafted tokens that may follow the committed ones."""
        node, path = self._root, list[int]()
        while node.after and len(path) < most:
            token = max(node.after, key=lambda token: node.after[token].stamp)
            path.append(token)
            node = node.after[token]
        return tuple(path)


def _drop_older(node: _Node, stamp: int) -> int:
    """Drops the subtrees below `node` whose stamp is below `stamp`, and returns their size."""
    dropped = 0
    for token, after in list(node.after.items()):
        if after.stamp < stamp:
            del node.after[token]
            dropped += 1 + _size(after)
        else:
            dropped += _drop_older(after, stamp)
    return dropped


def _size(node: _Node) -> int:
    return sum(1 + _size(after) for after in node.after.values())
