"""Which row of a step continues which earlier one. vLLM names no requests, and moves rows when others end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

ABSENT_STEPS = 2
"""Steps without a row after which it has left. One that comes back, after preemption, begins anew."""
_TAIL = 16
"""Last tokens by which moved rows are found, before all are compared."""

Ids = NDArray[np.int32]


class Held(NamedTuple):
    """A draft that arrived: what may follow the first `base` tokens."""

    base: int = 0
    token_ids: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class Row:
    """One sequence. `held` and `session` are set by the event loop, all else by the engine's thread.

    `sent_length`: how many tokens its session has. `offered`, `source`: what the last step was given to verify, at
    `drafted_at` tokens.
    """

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
        """Returns whether these tokens begin with the row's."""
        return len(self.tokens) <= len(ids) and np.array_equal(self.ids, ids[: len(self.tokens)])

    def extend(self, ids: Ids) -> None:
        """Takes the tokens that follow the row's in `ids`."""
        known, length = len(self.tokens), len(ids)
        if length > len(self._buffer):
            self._buffer = np.concatenate([self.ids, np.empty(2 * length - known, np.int32)])
        self._buffer[known:length] = ids[known:]
        self.tokens += ids[known:].tolist()

    def take_new(self) -> list[int]:
        """Returns the tokens that the session does not have, once."""
        new, self.sent_length = self.tokens[self.sent_length :], len(self.tokens)
        return new

    def draft(self, most: int) -> tuple[int, ...]:
        """Returns at most `most` tokens of what is left of the newest draft, if the tokens since agree with it."""
        base, drafted = self.held
        since = self.tokens[base:]
        if not base or tuple(since) != drafted[: len(since)]:
            return ()
        return drafted[len(since) :][:most]


class RowTable:
    """The rows of the step before, and those that are absent but may come back."""

    def __init__(self) -> None:
        self._placed: list[Row | None] = []
        self._away: list[Row] = []

    def __len__(self) -> int:
        return len(self._away) + sum(row is not None for row in self._placed)

    def follow(
        self, sampled: Sequence[Sequence[int]], lengths: Sequence[int], token_ids: NDArray[Any]
    ) -> tuple[list[Row | None], list[Row]]:
        """Returns the row of each place, with its new tokens, and the rows that have left.

        A place without sampled tokens, in the middle of a prompt, has no row.
        """
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
        """Forgets all rows, and returns them."""
        gone = [row for row in (*self._placed, *self._away) if row is not None]
        self._placed, self._away = [], []
        return gone


def _by_end(rows: Iterable[Row]) -> dict[tuple[int, bytes], list[Row]]:
    found: dict[tuple[int, bytes], list[Row]] = {}
    for row in rows:
        found.setdefault((len(row.tokens), row.ids[-_TAIL:].tobytes()), []).append(row)
    return found
