"""Ctrl-C, SIGTERM and SIGHUP: the first ends measuring with a report, the second ends the process."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOTICE = b"\ninterrupted: stopping the servers and reporting what was measured; interrupt again to exit at once\n"
SHOW_CURSOR = b"\x1b[?25h"


class Interruption:
    """Handles signals in its context, outside the event loop so that they work while a report is written."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.kill: Callable[[], None] = lambda: None  # called by a second signal
        self._before: dict[signal.Signals, Any] = {}
        self._cancel: Callable[[], object] = lambda: None

    @property
    def exit_code(self) -> int:
        return 128 + (self.signal or 0)

    @property
    def reason(self) -> str:
        return f"interrupted by {self.signal.name}" if self.signal else ""

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():  # only the main thread can handle signals
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP on purpose
                    self._before[number] = signal.signal(number, self._came)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in a new event loop; the first signal cancels it and raises CancelledError."""
        return asyncio.run(self._cancellable(work))

    async def _cancellable(self, work: Coroutine[Any, Any, T]) -> T:
        task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        try:
            if self.signal is not None:
                task.cancel()
            return await task
        finally:
            self._cancel = lambda: None

    def _came(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            self.kill()
            os.write(2, SHOW_CURSOR if os.isatty(2) else b"")
            os._exit(128 + number)
        self.signal = signal.Signals(number)
        os.write(2, NOTICE)  # the signal may have interrupted print
        self._cancel()
