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
from typing import Any

Step = Callable[[Sequence[Any]], Sequence[Any]]
MOST_AHEAD = 16
"""Rows of a sequence that may begin before the event loop has read the first of their results."""


class Stepper:
    """Makes the rows of one sequence, for the same `step`. Only one thread at a time calls it.

    `tokens`: those that the next row extends. `unread`: the rows whose results were not read, oldest first, each with
    its result to come. `error`: why no further row could be made.
    """

    def __init__(self, step: Step, tokens: Sequence[int]) -> None:
        self.step, self.tokens = step, tokens
        self.unread = deque[tuple[Any, "asyncio.Future[Any]"]]()
        self.error: Exception | None = None
        self._open = True

    @property
    def self_paced(self) -> bool:
        """Whether the device may begin the next row before the event loop has read the result of the last."""
        return False

    @property
    def notifies_each_step(self) -> bool:
        """Whether the event loop reads each result at once, not several together."""
        return False

    def follow(self, row: Any, result: Any) -> None:
        """Takes the result of a row, on the device's thread. A row that failed has none."""

    def next_row(self) -> Any:
        """Returns the next row; None if the event loop must act first."""
        raise NotImplementedError

    def after(self, row: Any, result: Any) -> Any:
        """Returns the row after `row`, on the device's thread; None if the device does not begin it by itself."""
        try:
            if self._open and not isinstance(result, Exception):
                self.follow(row, result)
                if self.self_paced and len(self.unread) < MOST_AHEAD:
                    return self.next_row()
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
    """A row that waits for its step, and its result to come. `stepper`: what made it.

    `size`: how much of the step's `limit` the row takes.
    """

    step: Step
    row: Any
    limit: int
    since: float
    prefill: bool
    done: asyncio.Future[Any]
    stepper: Stepper | None = None
    size: int = 1


def next_rows(rows: Sequence[Waiting], results: Sequence[Any], loop: asyncio.AbstractEventLoop) -> list[Waiting]:
    """Returns the rows that the steppers of `rows` make from their results, on the device's thread."""
    now, made = time.perf_counter(), list[Waiting]()
    for old, result in zip(rows, results, strict=True):
        if old.stepper and (row := old.stepper.after(old.row, result)) is not None:
            new = Waiting(old.step, row, old.limit, now, False, asyncio.Future(loop=loop), old.stepper)
            old.stepper.unread.append((row, new.done))
            made.append(new)
    return made
