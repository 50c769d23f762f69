"""A toy device that steps only when a test lets it: what happens during a step is told by steps, not by seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tests.support import HANG, until

NOTICED = 10.0
"""Seconds that a server has to hear of a cancellation while its device stands still, before a further step counts."""


class Gate:
    """Open at first. A context manager: at its end everything goes through, so that device threads end."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._closed = False
        self._leave = 0
        self.held = 0
        """Steps that stand at the gate now."""

    def guards(self, runner: Any) -> Any:
        """Every step of a ToyRunner passes here once its rows are at the device, before they are computed."""
        work = runner.work

        def gated() -> None:
            work()
            self._pass()

        runner.work = gated
        return runner

    def _pass(self) -> None:
        with self._changed:
            self.held += 1
            passed = self._changed.wait_for(lambda: not self._closed or self._leave > 0, HANG)
            self.held -= 1
            self._leave -= bool(self._closed)
        assert passed, "nobody opened the gate"

    def close(self) -> None:
        with self._changed:
            self._closed, self._leave = True, 0

    def open(self) -> None:
        with self._changed:
            self._closed = False
            self._changed.notify_all()

    def let(self, steps: int = 1) -> None:
        """So many more steps."""
        with self._changed:
            self._leave += steps
            self._changed.notify_all()

    async def stands(self) -> None:
        """Closes, and returns once a step stands at the gate."""
        self.close()
        await until(lambda: self.held > 0)

    async def comes_true_within(self, steps: int, condition: Callable[[], bool]) -> None:
        """Lets a closed device make `steps` steps, one after the other. Raises AssertionError where it takes more."""
        for _ in range(steps - 1):
            self.let()
            try:
                await until(condition, NOTICED)
                return
            except AssertionError:
                continue
        self.let()
        await until(condition)

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self.open()
