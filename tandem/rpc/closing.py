"""Closes remote sessions in the background, with retries that outlive their requests."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

from tandem.rpc.errors import TandemError
from tandem.speculation.errors import WORTH_REPEATING
from tandem.speculation.retry import doubled

SETTLE_SECONDS = 1.0  # a closing client waits for session closes


class SessionCloses:
    """A client's pending closes, each tried `attempts` times with waits doubling from `first` seconds."""

    def __init__(self, attempts: int = 6, first: float = 0.1) -> None:
        self._attempts, self._first = attempts, first
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, call: Callable[[], Awaitable[object]]) -> asyncio.Future[None]:
        """Starts `call`, which may raise TandemError; the future is done after its first attempt."""
        tried: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._until_answered(call, tried), name="close session")
        self._running.add(task)  # the event loop itself keeps no task alive
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda _: _set(tried))
        return tried

    async def _until_answered(self, call: Callable[[], Awaitable[object]], tried: asyncio.Future[None]) -> None:
        for attempt in range(self._attempts):
            try:
                await call()
                return
            except TandemError as error:
                if error.outcome not in WORTH_REPEATING:
                    return
            _set(tried)
            if attempt + 1 < self._attempts:
                await asyncio.sleep(doubled(self._first, math.inf, attempt))

    async def settle(self, seconds: float = SETTLE_SECONDS) -> None:
        running = list(self._running)
        if not running:
            return
        await asyncio.wait(running, timeout=seconds)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _set(tried: asyncio.Future[None]) -> None:
    if not tried.done():
        tried.set_result(None)
