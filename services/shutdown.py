"""How a server process ends in time: each part of its end is bounded, and the whole is bounded by force.

A device thread in a step that hangs, a socket that nobody reads, a collector that does not answer: none may keep a
process that was told to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

log = logging.getLogger("tandem.server")

STOP_SECONDS = 10.0
"""What a process has beyond its drain."""
PART_SECONDS = 2.0
"""What one part of its end has."""
_SAY_SECONDS = 1.0


class Ending:
    """Ends this process with 1, where it has not ended by itself when a time is over; a line in the log says why.

    Works while the event loop is held up, or logging itself. `leave` None: never, for a process that does more than
    serve.
    """

    def __init__(self, leave: Callable[[int], Any] | None = os._exit) -> None:
        self._leave = leave
        # What a signal handler may put into, whatever it interrupted.
        self._asked: queue.SimpleQueue[tuple[float, str]] = queue.SimpleQueue()

    def begin(self) -> None:
        """From now on `within` counts."""
        if self._leave:
            threading.Thread(target=self._watch, name="ending", daemon=True).start()

    def within(self, seconds: float, why: str) -> None:
        """The process ends within so many seconds; of several times the earliest counts."""
        self._asked.put((time.monotonic() + seconds, why))

    def _watch(self) -> None:
        at, why = self._asked.get()
        while (left := at - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                at, why = min((at, why), self._asked.get(timeout=left))
        said = threading.Thread(target=_say, args=(why,), daemon=True)  # whoever reads the log may have stopped
        said.start()
        said.join(_SAY_SECONDS)
        if self._leave:
            self._leave(1)


def _say(why: str) -> None:
    log.critical("ending by force: %s; threads: %s", why, _threads())
    sys.stdout.flush()


def _threads() -> str:
    """Where each thread is: what keeps the process."""
    frames = sys._current_frames()
    places = []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if frame and thread is not threading.current_thread():
            code = frame.f_code
            places.append(f"{thread.name} in {code.co_name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})")
    return ", ".join(places)


async def bounded(work: Awaitable[Any], what: str, seconds: float = PART_SECONDS) -> None:
    """Waits for a part of the end, but no longer than this. What it raises is logged."""
    task = asyncio.ensure_future(work)
    await asyncio.wait({task}, timeout=seconds)
    if not task.done():
        task.cancel()
        log.warning("stopping: %s took more than %g s and is left alone", what, seconds)
    elif not task.cancelled() and (error := task.exception()):
        log.error("stopping: %s failed", what, exc_info=error)


async def bounded_call(function: Callable[[], object], what: str, seconds: float = PART_SECONDS) -> None:
    """Likewise for a function that blocks: on a thread that keeps no process from ending."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def work() -> None:
        try:
            function()
        except Exception as error:
            log.error("stopping: %s failed", what, exc_info=error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=work, name=what, daemon=True).start()
    await bounded(done.wait(), what, seconds)
