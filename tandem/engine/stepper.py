"""Steppers make all decoding rows: the device's thread as each step ends, or the event loop where the device waits."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Step = Callable[[Sequence[Any]], Sequence[Any]]
MOST_AHEAD = 16  # rows of a sequence that may begin before the event loop reads the first result


class Stepper:
    """Makes the rows of one sequence, for the same `step`; one thread at a time."""

    def __init__(self, step: Step, tokens: Sequence[int]) -> None:
        self.step, self.tokens = step, tokens  # tokens: those that the next row extends
        self.unread = deque[tuple[Any, "asyncio.Future[Any]"]]()  # rows and results, oldest first
        self.error: Exception | None = None  # why no further row could be made
        self._open = True

    @property
    def self_paced(self) -> bool:
        """Whether the device may begin the next row before the event loop reads the last result."""
        return False

    @property
    def notifies_each_step(self) -> bool:
        """Whether the event loop reads each result at once."""
        return False

    def follow(self, row: Any, result: Any) -> None:
        """Takes the result of a row that did not fail, on the device's thread."""

    def next_row(self) -> Any:
        """Returns the next row; None if the event loop must act first."""
        raise NotImplementedError

    def after(self, row: Any, result: Any) -> Any:
        """Returns the row after `row`, on the device's thread; None if the event loop must make it."""
        try:
            if self._open and not isinstance(result, Exception):
                self.follow(row, result)
                if self.self_paced and len(self.unread) < MOST_AHEAD:
                    return self.next_row()
        except Exception as error:
            self.error = error  # the event loop raises it, in its request
        return None

    def end(self) -> None:
        """Drops unread rows; the device stops after the running step."""
        self._open = False
        while self.unread:
            self.unread.popleft()[1].cancel()


@dataclass(slots=True)
class Waiting:
    """A row that waits for its step, and its result."""

    step: Step
    row: Any
    limit: int
    since: float
    prefill: bool
    done: asyncio.Future[Any]
    stepper: Stepper | None = None
    size: int = 1  # counts against `limit`


def next_rows(rows: Sequence[Waiting], results: Sequence[Any], loop: asyncio.AbstractEventLoop) -> list[Waiting]:
    """Returns the rows that the steppers make from the results, on the device's thread."""
    now, made = time.perf_counter(), list[Waiting]()
    for old, result in zip(rows, results, strict=True):
        if old.stepper and (row := old.stepper.after(old.row, result)) is not None:
            new = Waiting(old.step, row, old.limit, now, False, asyncio.Future(loop=loop), old.stepper)
            old.stepper.unread.append((row, new.done))
            made.append(new)
    return made
