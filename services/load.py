"""How much work a server has, for whoever spreads requests over several."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from tandem.engine.slots import SlotPool

WINDOW_SECONDS = 10


class TokenRate:
    """Tokens per second over the last WINDOW_SECONDS."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._began = clock, clock()
        self._seconds: deque[list[int]] = deque(maxlen=WINDOW_SECONDS + 1)  # [second, tokens], ascending

    def add(self, tokens: int) -> None:
        now = int(self._clock())
        if self._seconds and self._seconds[-1][0] == now:
            self._seconds[-1][1] += tokens
        else:
            self._seconds.append([now, tokens])

    def __float__(self) -> float:
        now = self._clock()
        counted = sum(tokens for second, tokens in self._seconds if second > now - WINDOW_SECONDS)
        return counted / max(1.0, min(WINDOW_SECONDS, now - self._began))


class ServerLoad:
    """What runs and what waits on a server. With the slots of its engine, open sessions count too."""

    def __init__(self, slots: int, under_way: Callable[[], int], pool: SlotPool | None = None) -> None:
        self.slots, self._under_way, self._pool = slots, under_way, pool

    @property
    def running(self) -> int:
        """The number of requests that have a slot."""
        if self._pool is None:
            return min(self._under_way(), self.slots)
        return self._pool.count - self._pool.free

    @property
    def waiting(self) -> int:
        if self._pool is None:
            return max(0, self._under_way() - self.slots)
        return self._pool.waiting
