"""Allocates a fixed number of KV slots, lowest first, to requests that wait in order.

If the slots share less memory than all may take, a request also waits for that, and whoever came later waits behind it:
so a long sequence gets its turn however many short ones there are.
"""

from __future__ import annotations

import asyncio
import bisect
import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem.engine.kv_memory import KVMemory

MAX_WAITING = 256
"""Requests that may wait for a slot, besides `reserved_places`."""
KEPT_SECONDS = 2.0
"""How long the place of a named request whose wait timed out is kept for it to come back."""
_AFTER = 0.01
"""Seconds after which a time has passed for certain, whatever the resolution of the clock."""


def reserved_places(queue: int) -> int:
    """Returns how many further requests may wait in a queue of `queue` places if their callers have none running."""
    return math.ceil(queue / 8)


class NoFreeSlot(RuntimeError):
    """Every slot is taken; for `acquire`, the queue is also full or the wait has timed out."""


@dataclass(slots=True, eq=False)
class _Place:
    """A place in the queue. If `turn` is None, it is kept until `kept_until` for a request that may come back.

    `tokens`: the most of its sequence; None: as many as a slot holds.
    """

    name: Hashable
    tokens: int | None = None
    turn: asyncio.Future[int] | None = None
    kept_until: float = 0.0


class SlotPool:
    """Slots 0 to count - 1. Taking the lowest first keeps busy slots adjacent, so caches are read without a copy.

    `memory`: what the slots share; None: each has its own.
    """

    def __init__(self, count: int, max_waiting: int = MAX_WAITING + reserved_places(MAX_WAITING)) -> None:
        self._free = list(range(count))
        self._queue: list[_Place] = []
        self._max_waiting = max_waiting
        self._closed: Exception | None = None
        self.memory: KVMemory | None = None
        self.count = count

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a slot."""
        return sum(place.turn is not None for place in self._queue)

    @property
    def usage(self) -> float:
        """The share of the memory that is reserved, or of the slots that are taken."""
        return self.memory.reserved / self.memory.limit if self.memory else (self.count - self.free) / self.count

    def take(self, tokens: int | None = None) -> int:
        """Returns a free slot for a sequence of at most `tokens` (None: as many as fit), or raises NoFreeSlot."""
        self._check()
        if not self._fits(tokens):
            raise NoFreeSlot(self._full())
        slot = self._free.pop(0)
        if self.memory:
            self.memory.take(slot, tokens)
        return slot

    async def acquire(self, seconds: float | None = None, name: Hashable = None, tokens: int | None = None) -> int:
        """Waits for a slot, first come first served. Raises NoFreeSlot if too many wait, or after `seconds`.

        A request that comes back soon with the same `name` keeps its place, so that many short waits have the effect of
        a long one. `tokens`: the most of its sequence.
        """
        self._check()
        place = self._place(name)
        place.tokens = tokens
        if self._fits(tokens) and not self._held_back(place):
            self._leave(place)
            slot = self.take(tokens)
            self._serve()  # those whom this place held back
            return slot
        if place not in self._queue:
            if len(self._queue) >= self._max_waiting:
                raise NoFreeSlot(f"{self._full()} and {len(self._queue)} requests wait")
            self._queue.append(place)
        return await self._turn(place, seconds)

    def _fits(self, tokens: int | None) -> bool:
        return bool(self._free) and (self.memory is None or self.memory.fits(tokens))

    def _held_back(self, place: _Place) -> bool:
        """Whether others before `place` wait for memory, or have left for a moment."""
        return self.memory is not None and bool(self._queue) and self._queue[0] is not place

    def _full(self) -> str:
        if self.memory is None or not self._free:
            return f"all {self.count} KV slots are taken"
        return f"the memory of KV slots (kv_cache_mb) is taken: {self.memory.reserved} of {self.memory.limit} bytes"

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
            else:
                self._serve()
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
        loop = asyncio.get_running_loop()
        place.turn, place.kept_until = None, loop.time() + KEPT_SECONDS
        turn.set_exception(NoFreeSlot(self._full()))
        if place.name is None:
            self._leave(place)
            self._serve()
        elif self.memory:
            loop.call_later(KEPT_SECONDS + _AFTER, self._serve)  # those behind it are held back that long

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
        if self.memory:
            self.memory.release(slot)
        bisect.insort(self._free, slot)
        self._serve()

    def _serve(self) -> None:
        """Gives slots to those who wait, in order, as long as there are slots and memory."""
        while (place := self._next()) is not None and self._fits(place.tokens):
            self._leave(place)
            assert place.turn is not None
            place.turn.set_result(self.take(place.tokens))

    def _next(self) -> _Place | None:
        """Returns who is next: where memory is shared, nobody as long as the first has left for a moment."""
        for place in self._queue:
            if place.turn is not None and not place.turn.done():
                return place
            if self.memory and place.turn is None and place.kept_until > asyncio.get_running_loop().time():
                return None
        return None
