"""Lets the device thread go on with a sequence by itself: it makes the next row from each result, and runs it at once.

The event loop then finds the result of a row that it asks for. A row that it asks for but that was not foreseen ends
the run: what was foreseen is dropped, and costs nothing but its step, since the next one starts at its own position.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.runners.protocol import VerifyRow
from tandem.speculation.run_on import RunOn
from tandem.speculation.types import Verdict

log = logging.getLogger("tandem.engine")
MOST_AHEAD = 16
"""Rows that may have run before anybody asked for them."""

Follow = Callable[[Any, Any], Any]
"""Returns the row after a row and its result, on the device thread; None if somebody must look at the result first."""


@dataclass(slots=True)
class Waiting:
    """A row that waits for its step, and its result to come. `ahead`: continues the sequence by itself.

    `size`: how much of the step's `limit` the row takes.
    """

    step: Callable[[Sequence[Any]], Sequence[Any]]
    row: Any
    limit: int
    since: float
    prefill: bool
    done: asyncio.Future[Any]
    ahead: RunAhead | None = None
    size: int = 1


class RunAhead:
    """The rows of one sequence that were foreseen and that nobody has asked for yet, oldest first.

    `at_once`: whether the event loop should hear of every step as it ends.
    """

    def __init__(self, follow: Follow, at_once: Callable[[], bool]) -> None:
        self._follow, self.at_once = follow, at_once
        self._rows: deque[Waiting] = deque()
        self._open = True

    def after(self, row: Any, result: Any) -> Any:
        """Returns the row to go on with, on the device thread; None to wait for the event loop."""
        try:
            return self._follow(row, result) if self._open and len(self._rows) < MOST_AHEAD else None
        except Exception:
            log.exception("no row was foreseen")  # the event loop meets the error where a request can be told
            return None

    @property
    def next(self) -> Any:
        """The oldest row that was foreseen, or None."""
        return self._rows[0].row if self._open and self._rows else None

    def foresee(self, waiting: Waiting) -> None:
        """Records a row that runs next, before anybody can know the result of the one before."""
        self._rows.append(waiting)

    def take(self, row: Any) -> asyncio.Future[Any] | None:
        """Returns the result of `row` if it was foreseen. If another one was, the run is over."""
        if self._open and self._rows:
            if self._rows[0].row == row:
                return self._rows.popleft().done
            self.end()
        return None

    def end(self) -> None:
        """Drops what was foreseen; the device thread stops after the step that runs."""
        self._open = False
        while self._rows:
            self._rows.popleft().done.cancel()

    @property
    def over(self) -> bool:
        return not self._open


def following(rows: Sequence[Waiting], results: Sequence[Any], loop: asyncio.AbstractEventLoop) -> list[Waiting]:
    """Returns the rows of the step after that of `rows`, on the device thread; none if not all of them go on."""
    now, found = time.perf_counter(), list[tuple[RunAhead, Waiting]]()
    for old, result in zip(rows, results, strict=True):
        row = old.ahead.after(old.row, result) if old.ahead else None
        if old.ahead is None or row is None:
            return []
        new = Waiting(old.step, row, old.limit, now, False, asyncio.Future(loop=loop), old.ahead)
        found.append((old.ahead, new))
    for ahead, new in found:
        ahead.foresee(new)
    return [new for _, new in found]


def run_steps(run: RunOn) -> Follow:
    """Returns a function that makes a run's next row, with the drafts that have arrived, until the run must pause."""

    def follow(row: VerifyRow, result: object) -> VerifyRow | None:
        if not isinstance(result, Verdict) or row.processor or (draft := run.after(result.token_ids)) is None:
            return None
        position = row.position + len(result.token_ids)
        return VerifyRow(row.slot, position, result.token_ids[-1], draft, row.request, (), None, row.adapter)

    return follow
