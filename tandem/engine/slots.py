"""Allocates a fixed number of KV slots, lowest first, to waiting requests.

A free slot goes to the caller with the fewest, then to the earliest request, so a caller waits for one sequence to end
at most. Slots take memory as they are written. If they share less than all may take, a sequence reserves its maximum
with its slot, or waits for that memory, and later ones that fit pass. But after MAX_PASSED of them the first that waits
for memory is next, and holds back the others for up to HOLD_SECONDS.
"""

from __future__ import annotations

import asyncio
import bisect
import functools
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.engine.compatibility import able, refusal
from tandem.runners.capabilities import MemoryOnDemand, No
from tandem.runners.protocol import Runner

if TYPE_CHECKING:
    from tandem.engine.batcher import Batcher

log = logging.getLogger("tandem.engine")

MIB = 2**20
MAX_WAITING = 256  # requests, besides `reserved_places`
KEPT_SECONDS = 2.0  # for a named request to return after its wait timed out
MAX_PASSED, HOLD_SECONDS = 16, 8.0
_AFTER = 0.01  # seconds added to a timer, so that its time has passed at any clock resolution


def reserved_places(queue: int) -> int:
    """Further places in a queue of `queue` for requests of callers without a slot."""
    return math.ceil(queue / 8)


class NoFreeSlot(RuntimeError):
    """Every slot is taken; for `acquire`, the queue is also full or the wait has timed out."""


@dataclass(slots=True, eq=False)
class _Claim:
    name: Hashable
    number: int  # in order of arrival
    caller: Hashable
    tokens: int | None = None  # the sequence's maximum; None: a slot's
    turn: asyncio.Future[int] | None = None  # None: kept for a retry
    kept_until: float = 0.0
    passed: int = 0  # later requests served while it was the first to wait for memory, since its last hold
    holds_until: float = 0.0


class SlotPool:
    """Slots 0 to count - 1, lowest first: caches of adjacent slots are read without a copy."""

    def __init__(self, count: int, max_waiting: int = MAX_WAITING + reserved_places(MAX_WAITING)) -> None:
        self._free = list(range(count))
        self.queue: list[_Claim] = []
        self._numbers = itertools.count()
        self._taken: dict[int, _Claim] = {}  # the request that has the slot
        self._max_waiting = max_waiting
        self._closed: Exception | None = None
        self.memory: KVMemory | None = None
        self.caller: Callable[[], Hashable] = lambda: None
        self.count = count

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.count - len(self._free)

    @property
    def waiting(self) -> int:
        return sum(place.turn is not None for place in self.queue)

    @property
    def usage(self) -> float:
        """The share of memory reserved, or of slots taken."""
        return self.memory.reserved / self.memory.limit if self.memory else self.used / self.count

    def take(self, tokens: int | None = None) -> int:
        """A free slot for at most `tokens` (None: as many as fit). Raises NoFreeSlot."""
        self._check()
        return self._take(_Claim(None, next(self._numbers), self.caller(), tokens))

    def _take(self, place: _Claim) -> int:
        if not self.fits(place.tokens):
            raise NoFreeSlot(self._full())
        first = next((each for each in self.queue if not self.fits(each.tokens)), place)
        first.passed += first.number < place.number
        slot = self._free.pop(0)
        self._taken[slot] = place
        if self.memory:
            self.memory.take(slot, place.tokens)
        return slot

    async def acquire(self, seconds: float | None = None, name: Hashable = None, tokens: int | None = None) -> int:
        """Waits for a slot; retries with the same `name` keep their place. Raises NoFreeSlot."""
        self._check()
        place = self._place(name)
        place.tokens = tokens
        if self.fits(tokens) and not any(map(self._holds, self.queue)):
            self._leave(place)
            return self._take(place)
        if place not in self.queue:
            if len(self.queue) >= self._max_waiting:
                away = next((each for each in reversed(self.queue) if each.turn is None), None)
                if away is None:
                    raise NoFreeSlot(f"{self._full()} and {len(self.queue)} requests wait")
                self._leave(away)
            self.queue.append(place)
        return await self._turn(place, seconds)

    def fits(self, tokens: int | None) -> bool:
        return bool(self._free) and (self.memory is None or self.memory.fits(tokens))

    def _holds(self, place: _Claim) -> bool:
        """Whether a request that waits for memory holds back the others. A hold is bounded: others may not end soon."""
        memory, waits = self.memory, place.turn is not None and not place.turn.done()
        if memory is None or not waits or place.passed < MAX_PASSED or self.fits(place.tokens):
            return False
        earlier = sum(memory.reserved_by(slot) for slot, other in self._taken.items() if other.number < place.number)
        if earlier + memory.cost(place.tokens) > memory.limit:
            return False  # the others do not take what it waits for
        loop = asyncio.get_running_loop()
        if not place.holds_until:
            place.holds_until = loop.time() + HOLD_SECONDS
            loop.call_at(place.holds_until + _AFTER, self._serve)
        if loop.time() < place.holds_until:
            return True
        place.passed, place.holds_until = 0, 0.0
        return False

    def _full(self) -> str:
        if self.memory is None or not self._free:
            return f"all {self.count} KV slots are taken"
        return f"the memory of KV slots (kv_cache_mb) is taken: {self.memory.reserved} of {self.memory.limit} bytes"

    async def _turn(self, place: _Claim, seconds: float | None) -> int:
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

    def _place(self, name: Hashable) -> _Claim:
        self._forget()
        kept = (place for place in self.queue if name is not None and place.name == name and place.turn is None)
        return next(kept, None) or _Claim(name, next(self._numbers), self.caller())

    def _forget(self) -> None:
        now = asyncio.get_running_loop().time() if self.queue else 0.0
        for place in [place for place in self.queue if place.turn is None and place.kept_until <= now]:
            self._leave(place)

    def _too_late(self, place: _Claim, turn: asyncio.Future[int]) -> None:
        if turn.done():
            return
        loop = asyncio.get_running_loop()
        place.turn, place.kept_until = None, loop.time() + KEPT_SECONDS
        turn.set_exception(NoFreeSlot(self._full()))
        if place.name is None:
            self._leave(place)
        self._serve()  # it holds nobody back any more

    def _leave(self, place: _Claim) -> None:
        if place in self.queue:
            self.queue.remove(place)

    def close(self, error: Exception) -> None:
        """Waiting and later requests get `error`."""
        self._closed = error
        queue, self.queue = self.queue, []
        for place in queue:
            if place.turn is not None and not place.turn.done():
                place.turn.set_exception(error)

    def _check(self) -> None:
        if self._closed:
            raise self._closed

    def release(self, slot: int) -> None:
        """Safe while the slot's last step still runs, because later steps run after it."""
        if self.memory:
            self.memory.release(slot)
        self._taken.pop(slot, None)
        bisect.insort(self._free, slot)
        self._serve()

    def _serve(self) -> None:
        if self.queue:
            self._forget()
        while place := self._next():
            assert place.turn is not None
            self._leave(place)
            place.turn.set_result(self._take(place))

    def _next(self) -> _Claim | None:
        if not self._free or any(map(self._holds, self.queue)):
            return None
        having = Counter(place.caller for place in self._taken.values())
        for place in sorted(self.queue, key=lambda place: (place.passed < MAX_PASSED, having[place.caller])):
            if place.turn is not None and not place.turn.done() and self.fits(place.tokens):
                return place
        return None


class KVMemory:
    """Bytes that sequences reserve, of at most `limit`; `give_back` frees a slot's pages before any later step."""

    def __init__(
        self, limit: int, most_tokens: int, cost: Callable[[int], int], give_back: Callable[[int], object]
    ) -> None:
        self.limit, self._most_tokens = limit, most_tokens
        self._cost, self._give_back = cost, give_back
        self._reserved: dict[int, int] = {}
        self.reserved = 0  # bytes; any thread may read them

    def cost(self, tokens: int | None) -> int:
        """Bytes that a sequence of up to `tokens` (None: full length) reserves."""
        return self._cost(self._most_tokens if tokens is None else min(tokens, self._most_tokens))

    def reserved_by(self, slot: int) -> int:
        return self._reserved.get(slot, 0)

    def fits(self, tokens: int | None) -> bool:
        """Whether a sequence of up to `tokens` can be admitted now."""
        return self.reserved + self.cost(tokens) <= self.limit

    def take(self, slot: int, tokens: int | None) -> None:
        """Reserves memory for a sequence in `slot`, after `fits`."""
        self._reserved[slot] = self.cost(tokens)
        self.reserved += self._reserved[slot]

    def release(self, slot: int) -> None:
        """Frees the reservation of `slot` and its pages."""
        if slot in self._reserved:
            self.reserved -= self._reserved.pop(slot)
            self._give_back(slot)


def limit_kv_memory(slots: SlotPool, batcher: Batcher, runners: Sequence[Runner], given: int) -> None:
    """Bounds the memory of `slots` to `given` bytes, before there are sequences. Raises ValueError."""
    on_demand = [_on_demand(runner) for runner in runners]
    most = max(runner.limits.max_length for runner in runners)
    limit = given - sum(memory.spare_bytes for memory in on_demand)

    def cost(tokens: int) -> int:
        return sum(memory.kv_bytes(tokens) for memory in on_demand)

    def give_back(slot: int) -> None:
        for memory in on_demand:
            batcher.between_steps(functools.partial(memory.give_back, slot, 0))

    if cost(most) > limit:
        least = -(-(given - limit + cost(most)) // MIB)
        raise ValueError(
            f"kv_cache_mb: {given // MIB} is too little for a sequence of sequence_length {most}, which takes {least}"
        )
    slots.memory = KVMemory(limit, most, cost, give_back)
    whole = limit // cost(most)
    log.info("KV slots: %d in %d MiB, which is memory for %d of %d tokens", slots.count, given // MIB, whole, most)


def _on_demand(runner: Runner) -> MemoryOnDemand:
    memory = able(runner).memory_on_demand
    if isinstance(memory, No):
        raise refusal("kv_cache_mb", runner.identity.model_name, "memory_on_demand", memory)
    return memory
