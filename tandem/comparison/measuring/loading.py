"""Puts architectures under load, one after another, and measures every request at the client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tandem.comparison.measuring.conditions import Condition
from tandem.comparison.measuring.loads import Load, arrivals
from tandem.comparison.measuring.records import Record
from tandem.comparison.measuring.run import WARM_UP_TOKENS, Contender, attempt, rotated
from tandem.comparison.measuring.traffic import Asked

WARM_UP_REQUESTS = 4
"""Requests at once that warm up for an open loop."""


@dataclass(frozen=True)
class Loader:
    """Measures loads. `seed`: of the arrivals. `on_record` gets each record as its request ends."""

    contenders: Sequence[Contender]
    asked: Sequence[Asked]
    seed: int
    timeout_s: float | None
    on_load: Callable[[str, Load], None]
    on_record: Callable[[Record], None]

    async def measure(self, conditions: Sequence[Condition]) -> None:
        """Measures every load on every architecture; one is under load while the others are idle.

        All get the same requests in the same order, and in an open loop at the same times. The first place rotates.
        """
        for turn, condition in enumerate(conditions):
            assert condition.load is not None, "a condition under load"
            for contender in rotated(self.contenders, turn):
                self.on_load(contender.name, condition.load)
                await self._warm_up(contender, condition.load)
                await _Run(self, contender, condition.name, condition.load, time.perf_counter()).measure()

    async def _warm_up(self, contender: Contender, load: Load) -> None:
        """Sends short requests at once, so that no measurement includes a batch's first use; ignores failures."""
        users = load.concurrency or WARM_UP_REQUESTS
        await asyncio.gather(*(self.attempt(contender, _short(one), "warm-up") for one in self.asked[:users]))

    async def attempt(self, contender: Contender, one: Asked, condition: str) -> Record:
        record = Record(contender.name, one.prompt, one.workload, one.run, condition=condition)
        return await attempt(contender.apart(), record, one.request, self.timeout_s)


def _short(one: Asked) -> Asked:
    tokens = min(WARM_UP_TOKENS, one.request.max_new_tokens or WARM_UP_TOKENS)
    return replace(one, request=replace(one.request, max_new_tokens=tokens))


@dataclass(frozen=True)
class _Run:
    """One architecture under one load. `began`: seconds of time.perf_counter."""

    loader: Loader
    contender: Contender
    condition: str
    load: Load
    began: float

    async def measure(self) -> None:
        if self.load.rate is not None:
            await self._open(self.load.rate)
        else:
            await self._closed(self.load.concurrency or 1)

    async def _closed(self, users: int) -> None:
        waiting = iter(self.loader.asked)

        async def user() -> None:
            for one in waiting:  # shared: who is answered first takes the next
                await self._ask(one)

        await asyncio.gather(*(user() for _ in range(users)))

    async def _open(self, rate: float) -> None:
        times = arrivals(rate, len(self.loader.asked), self.loader.seed)

        async def arrive(at: float, one: Asked) -> None:
            await asyncio.sleep(max(0.0, at - self._now()))
            await self._ask(one)

        await asyncio.gather(*(arrive(at, one) for at, one in zip(times, self.loader.asked, strict=True)))

    async def _ask(self, one: Asked) -> None:
        sent = self._now()
        done = await self.loader.attempt(self.contender, one, self.condition)
        self.loader.on_record(replace(done, sent_s=sent, ended_s=self._now()))

    def _now(self) -> float:
        return time.perf_counter() - self.began
