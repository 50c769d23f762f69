"""Bounds the time of shutdown: a timeout per part, and the process is killed at the total."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from tandem.services.statuses import NotAccepting

log = logging.getLogger("tandem.server")

STOP_SECONDS = 10.0  # after the drain
PART_SECONDS = 2.0  # for one part
_LOG_SECONDS = 1.0


class ShutdownDeadline:
    """Kills a process that has not ended in time, even with a blocked event loop. `leave` None: never."""

    def __init__(self, leave: Callable[[int], Any] | None = os._exit) -> None:
        self._leave = leave
        # A SimpleQueue, because signal handlers put into it.
        self._asked: queue.SimpleQueue[tuple[float, str]] = queue.SimpleQueue()

    def begin(self) -> None:
        if self._leave:
            threading.Thread(target=self._watch, name="ending", daemon=True).start()

    def within(self, seconds: float, why: str) -> None:
        """Kills the process after `seconds`; the earliest call counts."""
        self._asked.put((time.monotonic() + seconds, why))

    def _watch(self) -> None:
        at, why = self._asked.get()
        while (left := at - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                at, why = min((at, why), self._asked.get(timeout=left))
        logging_thread = threading.Thread(target=_log_reason, args=(why,), daemon=True)  # writing the log may block
        logging_thread.start()
        logging_thread.join(_LOG_SECONDS)
        if self._leave:
            self._leave(1)


def _log_reason(why: str) -> None:
    log.critical("forced exit: %s; threads: %s", why, _threads())
    sys.stdout.flush()


def _threads() -> str:
    frames = sys._current_frames()
    places = []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if frame and thread is not threading.current_thread():
            code = frame.f_code
            places.append(f"{thread.name} in {code.co_name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})")
    return ", ".join(places)


async def bounded(work: Awaitable[Any], what: str, seconds: float = PART_SECONDS) -> None:
    """Waits up to `seconds` for a part of shutdown; logs its exceptions."""
    task = asyncio.ensure_future(work)
    await asyncio.wait({task}, timeout=seconds)
    if not task.done():
        task.cancel()
        log.warning("stopping: %s took more than %g s and is abandoned", what, seconds)
    elif not task.cancelled() and (error := task.exception()):
        log.error("stopping: %s failed", what, exc_info=error)


async def bounded_call(function: Callable[[], object], what: str, seconds: float = PART_SECONDS) -> None:
    """Like `bounded`, for a blocking function on a daemon thread."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def work() -> None:
        try:
            function()
        except Exception as error:
            log.error("stopping: %s failed", what, exc_info=error)
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=work, name=what, daemon=True).start()
    await bounded(done.wait(), what, seconds)


class Lifecycle:
    def __init__(self) -> None:
        self.accepting = True
        self.running = 0

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """Counts work while the block runs. Raises NotAccepting while draining."""
        self.check()
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def check(self) -> None:
        if not self.accepting:
            raise NotAccepting("the server is stopping and takes no new requests")

    async def drain(self, seconds: float, others: Callable[[], int]) -> None:
        """Refuses new work; waits up to `seconds` until none runs and `others()` is 0."""
        self.accepting = False
        deadline = asyncio.get_running_loop().time() + seconds
        while (self.running or others()) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
