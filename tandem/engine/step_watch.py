"""Watches a device's steps: one that hangs fails its rows and, if it does not return, the engine.

A timer checks about once a second. A step beyond its bound is abandoned: its rows get StepHung at once. If it returns
within the same time again, the device is used again; else the engine is lost and the process ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from tandem.engine.batcher import Batcher, DeviceLost

log = logging.getLogger("tandem.engine")

FIRST_SECONDS = 300.0  # for the first step of a kind, which an accelerator may have to compile or load
MIN_SECONDS = 30.0  # for later steps; a whole chunk takes many times as long as one token
TIMES_LONGEST = 20.0  # bound in multiples of the longest recent step
FADES = 0.999  # factor of the longest time with each further step
LOOKS_EVERY = 1.0


class StepBound:
    """A step's maximum seconds: fixed, or learned by the type of its rows. Raises ValueError."""

    def __init__(self, fixed: float | None = None) -> None:
        if fixed is not None and not 0 < fixed < float("inf"):
            raise ValueError(f"step_seconds: {fixed} is neither above 0, nor auto, nor 0 for no bound")
        self._fixed = fixed
        self._longest: dict[type, float] = {}
        self.looks_every = LOOKS_EVERY if fixed is None else min(LOOKS_EVERY, fixed / 4)

    def learn(self, kind: type, seconds: float) -> None:
        longest = self._longest.get(kind, 0.0) * FADES
        self._longest[kind] = seconds if seconds > longest else longest

    def seconds(self, kind: type) -> float:
        if self._fixed is not None:
            return self._fixed
        longest = self._longest.get(kind)
        return FIRST_SECONDS if longest is None else max(MIN_SECONDS, TIMES_LONGEST * longest)


def parse_step_seconds(given: str) -> float | None:
    """Parses --step_seconds: a number, or None for auto. Raises ValueError."""
    try:
        return None if given == "auto" else float(given)
    except ValueError:
        raise ValueError(f"step_seconds: {given!r} is neither a number nor auto") from None


class StepWatch:
    """Watches one device thread; calls `lose` once if a step that hung fails or does not return."""

    def __init__(
        self,
        batcher: Batcher,
        bound: StepBound,
        lose: Callable[[DeviceLost], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._batcher, self._bound, self._lose, self._clock = batcher, bound, lose, clock
        self._number, self._ran, self._limit, self._looked = -1, 0.0, 0.0, clock()
        self._hangs = self._lost = False
        self.changed: Callable[[bool], None] = lambda fine: None
        batcher.learn, batcher.came_back = bound.learn, self._came_back

    async def forever(self) -> None:
        while True:
            await asyncio.sleep(self._bound.looks_every)
            self.look()

    def look(self) -> None:
        # time in which the event loop did not run does not count: the whole process was stopped
        now = self._clock()
        passed, self._looked = min(now - self._looked, 2 * self._bound.looks_every), now
        number, rows = self._batcher.running
        if not rows or number != self._number:
            self._number, self._ran = (number if rows else -1), 0.0
            return
        self._ran += passed
        if not self._hangs:
            self._limit = self._bound.seconds(type(rows[0]))
            if self._ran >= self._limit:
                self._abandon(rows)
        elif not self._lost and self._ran >= 2 * self._limit:
            self._give_up(DeviceLost(f"a step did not return within {self._ran:.1f} s"))

    def _abandon(self, rows: list[object]) -> None:
        self._hangs = True
        log.error(
            "a step hangs: one of %d %ss has run for %.1f s, its limit is %.1f s (--step_seconds); "
            "its callers get an error, and the process ends unless it returns within the same time again",
            len(rows),
            type(rows[0]).__name__,
            self._ran,
            self._limit,
        )
        self._batcher.abandon(f"a step of the device has run for {self._ran:.1f} s without returning")
        self.changed(False)

    def _came_back(self, failed: DeviceLost | None) -> None:
        if failed is not None:
            return self._give_up(failed)
        log.warning("the hung step returned after %.1f s: serving again", self._ran)
        self._hangs = False
        self.changed(True)

    def _give_up(self, error: DeviceLost) -> None:
        self._lost = True
        log.error("the hung step is abandoned: %s", error)
        self._lose(error)
