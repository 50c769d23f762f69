"""Restarts a server's background tasks with growing waits, not ready meanwhile; at last ends the server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

log = logging.getLogger("tandem.server")

Work = Callable[[], Awaitable[None]]

RESTARTS = (1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before each restart; running again after as long
SOUND_SECONDS = 300.0  # after which a task has all restarts again


class Supervisor:
    """`changed` is called when a task is down and when all run."""

    def __init__(self, works: Mapping[str, Work], changed: Callable[[bool], None] = lambda fine: None) -> None:
        self._works, self._changed = works, changed
        self._down: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self.gave_up = asyncio.Event()

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep(name, work), name=name) for name, work in self._works.items()]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, name: str, work: Work) -> None:
        clock, waits, waited = asyncio.get_running_loop().time, iter(RESTARTS), 0.0
        while True:
            began, error = clock(), await self._ended(name, work, waited)
            self._runs(name, False)
            waits = iter(RESTARTS) if clock() - began > SOUND_SECONDS else waits
            wait = next(waits, None)
            if wait is None:
                log.critical("%s ended too often: the server stops", name, exc_info=error)
                self.gave_up.set()
                return
            log.error("%s ended (%s): not ready until it runs again, in %g s", name, error, wait, exc_info=error)
            await asyncio.sleep(wait)
            waited = wait

    async def _ended(self, name: str, work: Work, waited: float) -> Exception:
        running = asyncio.get_running_loop().call_later(waited, self._runs, name, True)
        try:
            await work()
        except Exception as error:
            return error
        finally:
            running.cancel()
        return RuntimeError("it returned")

    def _runs(self, name: str, fine: bool) -> None:
        before = bool(self._down)
        (self._down.discard if fine else self._down.add)(name)
        if bool(self._down) is not before:
            self._changed(fine)
