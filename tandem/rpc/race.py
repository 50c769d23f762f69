"""Sends a hedged request: tries servers in turn, several at once when one is slow; the first answer wins."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine
from typing import Any, Generic, TypeVar

from tandem.rpc.errors import TandemError
from tandem.speculation.outcomes import LOST, Outcome

Server = TypeVar("Server")
Reply = TypeVar("Reply")


class Race(Generic[Server, Reply]):
    """A hedged request to one of several servers.

    `attempt` calls a server. `following` returns the next server, given those being called, or None. `failed` handles a
    failed server: it returns the seconds until the next attempt, or raises to end the race; while other calls are
    pending, only an error of the request itself ends it. `slow` returns the seconds until another server is called too.
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
        """Servers that are being called and have not answered."""
        return list(self._asked.values())

    async def first(self) -> tuple[Server, Reply]:
        """Returns the first server to answer and its reply; cancels the other calls. Raises TandemError."""
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
