"""Matches a step's rows to earlier ones: vLLM names no requests and moves rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

ABSENT_STEPS = 2  # after which a row has left; preempted rows begin anew
_TAIL = 16  # last tokens compared first, to find moved rows

Ids = NDArray[np.int32]


class Held(NamedTuple):
    """A draft of what follows the first `base` tokens."""

    base: int = 0
    token_ids: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class Row:
    """The event loop sets `held` and `session`, the engine's thread the rest. `sent_length`: the session's tokens."""

    tokens: list[int] = field(default_factory=list)
    held: Held = field(default_factory=Held)
    sent_length: int = 0
    offered: int = 0
    drafted_at: int = 0
    source: str = ""
    left: bool = False
    session: Any = None
    _buffer: Ids = field(default_factory=lambda: np.empty(256, np.int32))
    absent: int = 0

    @property
    def ids(self) -> Ids:
        return self._buffer[: len(self.tokens)]

    def precedes(self, ids: Ids) -> bool:
        return len(self.tokens) <= len(ids) and np.array_equal(self.ids, ids[: len(self.tokens)])

    def extend(self, ids: Ids) -> None:
        known, length = len(self.tokens), len(ids)
        if length > len(self._buffer):
            self._buffer = np.concatenate([self.ids, np.empty(2 * length - known, np.int32)])
        self._buffer[known:length] = ids[known:]
        self.tokens += ids[known:].tolist()

    def take_new(self) -> list[int]:
        new, self.sent_length = self.tokens[self.sent_length :], len(self.tokens)
        return new

    def draft(self, most: int) -> tuple[int, ...]:
        """Returns at most `most` tokens of the newest draft, if it agrees."""
        base, drafted = self.held
        since = self.tokens[base:]
        if not base or tuple(since) != drafted[: len(since)]:
            return ()
        return drafted[len(since) :][:most]


class RowMatcher:
    def __init__(self) -> None:
        self._placed: list[Row | None] = []
        self._away: list[Row] = []

    def __len__(self) -> int:
        return len(self._away) + sum(row is not None for row in self._placed)

    def follow(
        self, sampled: Sequence[Sequence[int]], lengths: Sequence[int], token_ids: NDArray[Any]
    ) -> tuple[list[Row | None], list[Row]]:
        """Returns the rows by place, with new tokens, and the rows that left; partial prompts have None."""
        ids = [np.asarray(token_ids[i, : int(lengths[i])], np.int32) if new else None for i, new in enumerate(sampled)]
        known = {id(row): row for row in (*self._placed, *self._away) if row is not None}
        found: list[Row | None] = [None] * len(ids)
        for i, (mine, before) in enumerate(zip(ids, self._placed, strict=False)):
            if mine is not None and before is not None and before.precedes(mine):
                found[i] = known.pop(id(before))
        moved = _by_end(known.values())
        for i, mine in enumerate(ids):
            if mine is not None and found[i] is None:
                length = len(mine) - len(sampled[i])
                candidates = moved.get((length, mine[max(0, length - _TAIL) : length].tobytes()), ())
                row = next((one for one in candidates if id(one) in known and one.precedes(mine)), None)
                found[i] = known.pop(id(row)) if row else Row()
        for row, mine in zip(found, ids, strict=True):
            if row is not None and mine is not None:
                row.extend(mine)
                row.absent = 0
        for row in known.values():
            row.absent += 1
        self._placed = found
        self._away = [row for row in known.values() if row.absent < ABSENT_STEPS]
        return found, [row for row in known.values() if row.absent >= ABSENT_STEPS]

    def clear(self) -> list[Row]:
        gone = [row for row in (*self._placed, *self._away) if row is not None]
        self._placed, self._away = [], []
        return gone


def _by_end(rows: Iterable[Row]) -> dict[tuple[int, bytes], list[Row]]:
    found: dict[tuple[int, bytes], list[Row]] = {}
    for row in rows:
        found.setdefault((len(row.tokens), row.ids[-_TAIL:].tobytes()), []).append(row)
    return found
