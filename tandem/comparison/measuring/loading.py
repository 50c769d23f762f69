"""Measures architectures under load, one after another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from tandem.comparison.measuring.conditions import Condition
from tandem.comparison.measuring.distributions import distribution
from tandem.comparison.measuring.loads import Load, arrivals
from tandem.comparison.measuring.records import Record
from tandem.comparison.measuring.run import Contender, attempt, rotated, short
from tandem.comparison.measuring.traffic import Asked

WARM_UP_REQUESTS = 4


async def measure_loads(
    contenders: Sequence[Contender],
    asked: Sequence[Asked],
    conditions: Sequence[Condition],
    seed: int,
    on_load: Callable[[str, Load], None],
    on_record: Callable[[Record], None],
    bound_s: float | None = None,
) -> None:
    """Puts each load on each architecture while the others idle, with the same requests and arrival times.

    `bound_s`: an architecture whose 95th percentile of TPOT exceeds it gets no more users.
    """
    full = set[str]()
    for turn, condition in enumerate(conditions):
        load = condition.load
        assert load is not None, "a condition under load"
        for contender in rotated(contenders, turn):
            if contender.name in full and load.concurrency:
                continue
            on_load(contender.name, load)
            await _warm_up(contender, asked[: load.concurrency or WARM_UP_REQUESTS])
            tpots = list[float | None]()

            def measured(record: Record, tpots: list[float | None] = tpots) -> None:
                tpots.append(record.measurement.tpot_s if record.measurement else None)
                on_record(record)

            await _run(contender, asked[: load.requests], condition, seed, measured)
            if bound_s is not None and (distribution(tpots).p95 or 0.0) > bound_s:
                full.add(contender.name)


async def _warm_up(contender: Contender, asked: Sequence[Asked]) -> None:
    """Sends short requests at once, so that no measurement includes a batch's first use."""
    requests = (replace(one, request=short(one.request)) for one in asked)
    await asyncio.gather(*(_attempt(contender.of(user), one, "warm-up") for user, one in enumerate(requests)))


async def _run(
    contender: Contender, asked: Sequence[Asked], condition: Condition, seed: int, on_record: Callable[[Record], None]
) -> None:
    assert condition.load is not None, "a condition under load"
    load, began = condition.load, time.perf_counter()

    async def ask(one: Asked, at: float = 0.0, number: int = 0) -> None:
        await asyncio.sleep(max(0.0, at - (time.perf_counter() - began)))
        sent = time.perf_counter() - began
        done = await _attempt(contender.of(number), one, condition.name)
        on_record(replace(done, sent_s=sent, ended_s=time.perf_counter() - began))

    async def user(number: int) -> None:
        for one in waiting:  # shared: who is answered first takes the next
            await ask(one, number=number)

    if load.rate is not None:
        times = arrivals(load.rate, len(asked), seed)
        await asyncio.gather(*(ask(one, at) for at, one in zip(times, asked, strict=True)))
    else:
        waiting = iter(asked)
        await asyncio.gather(*(user(number) for number in range(load.concurrency or 1)))


async def _attempt(contender: Contender, one: Asked, condition: str) -> Record:
    record = Record(contender.name, one.prompt, one.workload, one.run, condition=condition)
    return await attempt(contender.apart(), record, one.request, alone=False)
