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
                await self._run(contender, condition.name, condition.load)

    async def _warm_up(self, contender: Contender, load: Load) -> None:
        """Sends short requests at once, so that no measurement includes a batch's first use; ignores failures."""
        users = load.concurrency or WARM_UP_REQUESTS
        await asyncio.gather(*(self._attempt(contender, _short(one), "warm-up") for one in self.asked[:users]))

    async def _run(self, contender: Contender, condition: str, load: Load) -> None:
        """Measures one load on one architecture."""
        began = time.perf_counter()

        async def ask(one: Asked, at: float = 0.0) -> None:
            await asyncio.sleep(max(0.0, at - (time.perf_counter() - began)))
            sent = time.perf_counter() - began
            done = await self._attempt(contender, one, condition)
            self.on_record(replace(done, sent_s=sent, ended_s=time.perf_counter() - began))

        async def user() -> None:
            for one in waiting:  # shared: who is answered first takes the next
                await ask(one)

        if load.rate is not None:
            times = arrivals(load.rate, len(self.asked), self.seed)
            await asyncio.gather(*(ask(one, at) for at, one in zip(times, self.asked, strict=True)))
        else:
            waiting = iter(self.asked)
            await asyncio.gather(*(user() for _ in range(load.concurrency or 1)))

    async def _attempt(self, contender: Contender, one: Asked, condition: str) -> Record:
        record = Record(contender.name, one.prompt, one.workload, one.run, condition=condition)
        return await attempt(contender.apart(), record, one.request, self.timeout_s)


def _short(one: Asked) -> Asked:
    tokens = min(WARM_UP_TOKENS, one.request.max_new_tokens or WARM_UP_TOKENS)
    return replace(one, request=replace(one.request, max_new_tokens=tokens))
