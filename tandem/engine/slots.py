"""Allocates a fixed number of KV slots, lowest first, to requests that wait in order."""

from __future__ import annotations

import asyncio
import bisect
import math
from collections.abc import Hashable
from dataclasses import dataclass

MAX_WAITING = 256
"""Requests that may wait for a slot, besides `reserved_places`."""
KEPT_SECONDS = 2.0
"""How long the place of a named request whose wait timed out is kept for it to come back."""


def reserved_places(queue: int) -> int:
    """Returns how many further requests may wait in a queue of `queue` places if their callers have none running."""
    return math.ceil(queue / 8)


class NoFreeSlot(RuntimeError):
    """Every slot is taken; for `acquire`, the queue is also full or the wait has timed out."""


@dataclass(slots=True, eq=False)
class _Place:
    """A place in the queue. If `turn` is None, it is kept until `kept_until` for a request that may come back."""

    name: Hashable
    turn: asyncio.Future[int] | None = None
    kept_until: float = 0.0


class SlotPool:
    """Slots 0 to count - 1. Taking the lowest first keeps busy slots adjacent, so caches are read without a copy."""

    def __init__(self, count: int, max_waiting: int = MAX_WAITING + reserved_places(MAX_WAITING)) -> None:
        self._free = list(range(count))
        self._queue: list[_Place] = []
        self._max_waiting = max_waiting
        self._closed: Exception | None = None
        self.count = count

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a slot."""
        return sum(place.turn is not None for place in self._queue)

    def take(self) -> int:
        """Returns a free slot, or raises NoFreeSlot."""
        self._check()
        if not self._free:
            raise NoFreeSlot(f"all {self.count} KV slots are taken")
        return self._free.pop(0)

    async def acquire(self, seconds: float | None = None, name: Hashable = None) -> int:
        """Waits for a slot, first come first served. Raises NoFreeSlot if too many wait, or after `seconds`.

        A request that comes back soon with the same `name` keeps its place, so that many short waits have the effect of
        a long one.
        """
        self._check()
        place = self._place(name)
        if self._free:
            self._leave(place)
            return self.take()
        if place not in self._queue:
            if len(self._queue) >= self._max_waiting:
                raise NoFreeSlot(f"all {self.count} KV slots are taken and {len(self._queue)} requests wait")
            self._queue.append(place)
        return await self._turn(place, seconds)

    async def _turn(self, place: _Place, seconds: float | None) -> int:
        loop = asyncio.get_running_loop()
        turn = place.turn = loop.create_future()
        timer = None if seconds is None else loop.call_later(seconds, self._too_late, place, turn)
        try:
            return await turn
        except asyncio.CancelledError:
            self._leave(place)
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.release(turn.result())
            raise
        finally:
            if timer:
                timer.cancel()

    def _place(self, name: Hashable) -> _Place:
        """Returns the place kept for `name`, or a new one; drops places that were kept too long."""
        if self._queue:
            now = asyncio.get_running_loop().time()
            self._queue = [place for place in self._queue if place.turn is not None or place.kept_until > now]
        kept = (place for place in self._queue if name is not None and place.name == name and place.turn is None)
        return next(kept, None) or _Place(name)

    def _too_late(self, place: _Place, turn: asyncio.Future[int]) -> None:
        if turn.done():
            return
        place.turn, place.kept_until = None, asyncio.get_running_loop().time() + KEPT_SECONDS
        if place.name is None:
            self._leave(place)
        turn.set_exception(NoFreeSlot(f"all {self.count} KV slots are taken"))

    def _leave(self, place: _Place) -> None:
        if place in self._queue:
            self._queue.remove(place)

    def close(self, error: Exception) -> None:
        """Closes the pool: waiting and later requests get `error`."""
        self._closed = error
        queue, self._queue = self._queue, []
        for place in queue:
            if place.turn is not None and not place.turn.done():
                place.turn.set_exception(error)

    def _check(self) -> None:
        if self._closed:
            raise self._closed

    def release(self, slot: int) -> None:
        """Returns a slot to the pool. Safe while its last step still runs, because later steps run after it."""
        for place in self._queue:
            if place.turn is not None and not place.turn.done():
                self._leave(place)
                place.turn.set_result(slot)
                return
        bisect.insort(self._free, slot)
