"""A hedged request: tries servers in turn, another beside a slow one; the first answer wins."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine
from typing import Any, Generic, TypeVar

from tandem.rpc.errors import TandemError
from tandem.speculation.errors import LOST, Outcome

Server = TypeVar("Server")
Reply = TypeVar("Reply")


class Race(Generic[Server, Reply]):
    """`following` returns the next server, given those being called, or None. `slow`: seconds before another is tried.

    `failed` returns the seconds until the next attempt, or raises; while other calls are pending, only an error of the
    request itself ends the race.
    """

    def __init__(
        self,
        attempt: Callable[[Server], Coroutine[Any, Any, Reply]],
        following: Callable[[Collection[Server]], Server | None],
        failed: Callable[[Server, TandemError], float],
        slow: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._attempt, self._following, self._failed, self._slow = attempt, following, failed, slow
        self._clock = clock
        self._asked: dict[asyncio.Task[Reply], Server] = {}

    @property
    def in_progress(self) -> list[Server]:
        return list(self._asked.values())

    async def first(self) -> tuple[Server, Reply]:
        """Returns the first server to answer and its reply. Raises TandemError."""
        ask_at = self._clock()
        try:
            while True:
                server = self._following(self._asked.values())
                left = ask_at - self._clock()
                if server is not None and left <= 0:
                    self._asked[asyncio.create_task(self._attempt(server), name="open")] = server
                    ask_at = self._clock() + self._slow()
                elif self._asked:
                    timeout = None if server is None or left == float("inf") else left
                    await asyncio.wait(self._asked, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                    failed = [task for task in self._asked if task.done() and task.exception()]
                    for task in self._asked:
                        if task.done() and task not in failed:
                            return self._asked.pop(task), task.result()
                    for task in failed:
                        ask_at = self._clock() + self._pause(self._asked.pop(task), task.exception())
                else:
                    await asyncio.sleep(left)
        finally:
            await self._leave()

    def _pause(self, server: Server, error: BaseException | None) -> float:
        if not isinstance(error, TandemError):
            assert error is not None
            raise error
        try:
            return self._failed(server, error)
        except TandemError as final:
            if self._asked and final.outcome in LOST | {Outcome.FULL}:
                return float("inf")
            raise

    async def _leave(self) -> None:
        for task in self._asked:
            task.cancel()
        await asyncio.gather(*self._asked, return_exceptions=True)
