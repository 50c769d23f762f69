"""Steppers: the only makers of the rows that decode. Each row follows from the result of the one before.

The device's thread makes a row as soon as the one before has ended, and the event loop reads the result later. Where
the device must wait (for a draft length, a client's message, a prompt's chunks), the loop asks for the row instead.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Step = Callable[[Sequence[Any]], Sequence[Any]]
MOST_AHEAD = 16
"""Rows of a sequence that may begin before the event loop has read the first of their results."""


class Stepper(Protocol):
    """Makes the rows of one sequence. Only one thread at a time calls it."""

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens that the next row extends."""

    @property
    def self_paced(self) -> bool:
        """Whether the device may begin the next row before the event loop has read the result of the last."""

    def follow(self, row: Any, result: Any) -> None:
        """Takes the result of a row, on the device's thread. A row that failed has none."""

    def next_row(self) -> Any:
        """Returns the next row; None if the event loop must act first."""

    def notify_each_step(self) -> bool:
        """Whether the event loop reads each result at once, not several together."""


class SteppedRows:
    """The rows of one stepper whose results were not read, oldest first, each with its result to come."""

    def __init__(self, step: Step, stepper: Stepper) -> None:
        self.step, self.stepper = step, stepper
        self.unread = deque[tuple[Any, "asyncio.Future[Any]"]]()
        self.error: Exception | None = None
        self._open = True

    def after(self, row: Any, result: Any) -> Any:
        """Returns the row after `row`, on the device's thread; None if the device does not begin it by itself."""
        try:
            if self._open and not isinstance(result, Exception):
                self.stepper.follow(row, result)
                if self.stepper.self_paced and len(self.unread) < MOST_AHEAD:
                    return self.stepper.next_row()
        except Exception as error:
            self.error = error  # the event loop raises it, where a request can be told
        return None

    def end(self) -> None:
        """Drops the rows that were not read; the device stops after the step that runs."""
        self._open = False
        while self.unread:
            self.unread.popleft()[1].cancel()


@dataclass(slots=True)
class Waiting:
    """A row that waits for its step, and its result to come. `stepped`: the rows of its stepper.

    `size`: how much of the step's `limit` the row takes.
    """

    step: Step
    row: Any
    limit: int
    since: float
    prefill: bool
    done: asyncio.Future[Any]
    stepped: SteppedRows | None = None
    size: int = 1


def next_rows(rows: Sequence[Waiting], results: Sequence[Any], loop: asyncio.AbstractEventLoop) -> list[Waiting]:
    """Returns the rows that the steppers of `rows` make from their results, on the device's thread."""
    now, made = time.perf_counter(), list[Waiting]()
    for old, result in zip(rows, results, strict=True):
        row = old.stepped.after(old.row, result) if old.stepped else None
        if old.stepped and row is not None:
            new = Waiting(old.step, row, old.limit, now, False, asyncio.Future(loop=loop), old.stepped)
            old.stepped.unread.append((row, new.done))
            made.append(new)
    return made
