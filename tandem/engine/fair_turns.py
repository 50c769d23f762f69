"""Limits concurrent use of a resource; waiting callers take turns, one each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")


class TooManyWaiting(RuntimeError):
    """The caller's queue for turns is full."""


class FairTurns:
    """At most `most` turns at a time, oldest last turn first. `what`: a turn's purpose. `waiting`: limit per caller."""

    def __init__(self, what: str, most: int, waiting: int) -> None:
        self._what, self._most, self._each = what, most, waiting
        self._running: set[Hashable] = set()
        self._waiting: dict[Hashable, list[asyncio.Future[None]]] = {}  # the caller that is served next comes first
        self.caller: Callable[[], Hashable] = lambda: None

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncGenerator[None, None]:
        """Waits for a turn, which lasts as long as the block. Raises TooManyWaiting."""
        who = self.caller()
        if who in self._running or len(self._running) >= self._most:
            await self._wait(who)
        else:
            self._running.add(who)
        try:
            yield
        finally:
            self._end(who)

    async def _wait(self, who: Hashable) -> None:
        waiting = self._waiting[who] = [turn for turn in self._waiting.get(who, ()) if not turn.done()]
        if len(waiting) >= self._each:
            raise TooManyWaiting(f"{len(waiting)} of your requests wait for {self._what}, the limit is {self._each}")
        turn = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it had just come
                self._end(who)
            raise

    def _end(self, who: Hashable) -> None:
        self._running.discard(who)
        if who in self._waiting:
            self._waiting[who] = self._waiting.pop(who)  # behind all others
        for caller in [caller for caller in self._waiting if caller not in self._running]:
            if len(self._running) >= self._most:
                return
            waiting = [turn for turn in self._waiting.pop(caller) if not turn.done()]
            if waiting:
                self._running.add(caller)
                waiting.pop(0).set_result(None)
            if waiting:
                self._waiting[caller] = waiting


class FairThread:
    """A thread for calls that callers can make long, by fair turns."""

    def __init__(self, name: str, what: str, waiting: int) -> None:
        self.turns = FairTurns(what, 1, waiting)
        self._thread = ThreadPoolExecutor(1, name)

    async def run(self, function: Callable[..., Result], *args: Any) -> Result:
        async with self.turns.turn():
            return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
