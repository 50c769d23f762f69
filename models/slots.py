"""KV slots: fixed in number, handed out lowest first, waited for in order."""

from __future__ import annotations

import asyncio
import bisect
from collections import deque

MOST_WAITING = 256
"""Requests that may wait for a slot; an eighth more of callers that have nothing under way (services/generation.py)."""


class NoFreeSlot(RuntimeError):
    """Every slot is taken (and, for `acquire`, so is every place in the queue)."""


class SlotPool:
    """Slots 0 .. count-1. Lowest first keeps the busy ones neighbours, whose caches are read without a copy."""

    def __init__(self, count: int, max_waiting: int = MOST_WAITING + MOST_WAITING // 8) -> None:
        self._free = list(range(count))
        self._waiting: deque[asyncio.Future[int]] = deque()
        self._max_waiting = max_waiting
        self._closed: Exception | None = None
        self.count = count

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self._waiting)

    def take(self) -> int:
        """A slot now, or NoFreeSlot."""
        self._check()
        if not self._free:
            raise NoFreeSlot(f"all {self.count} KV slots are taken")
        return self._free.pop(0)

    async def acquire(self) -> int:
        """A slot as soon as one is free, first come first served; NoFreeSlot if too many wait already."""
        self._check()
        if self._free:
            return self.take()
        if len(self._waiting) >= self._max_waiting:
            raise NoFreeSlot(f"all {self.count} KV slots are taken and {len(self._waiting)} requests wait")
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.release(turn.result())
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    def close(self, error: Exception) -> None:
        """Nobody gets a slot any more: who waits for one, or comes later, gets `error`."""
        self._closed = error
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(error)

    def _check(self) -> None:
        if self._closed:
            raise self._closed

    def release(self, slot: int) -> None:
        """Gives a slot back. Safe while its last step still runs: later steps come after it on the same thread."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(slot)
                return
        bisect.insort(self._free, slot)
