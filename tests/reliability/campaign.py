"""One fault schedule, whole: real servers of the toy runner here, clients of every kind, faults by seed, the verdict.

python -m tests.reliability.campaign --seed 17        runs that schedule again and prints its history
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tandem.engine.prefix_cache import PrefixCache
from tandem.rpc.channel import DRAFT
from tandem.rpc.verifier_client import Deadlines
from tandem.services.target_verifier import TargetVerifierService
from tandem.speculation.types import Rule
from tandem.speculation.verification_mode import Pipeline
from tests.reliability.faults import FaultInterceptor, Schedule
from tests.reliability.history import Event, History, count_faults
from tests.reliability.traffic import Ask, Ended, WireClient, WireRunClient, by_generate, wishes
from tests.reliability.validator import Validator, Violation
from tests.support import (
    Site,
    distributed,
    fused_site,
    let_all_expire,
    let_expire,
    raw_stub,
    target_site,
    toy,
    until,
    with_adapters,
    worker_site,
)
from tests.toy import ToyRunner

DEADLINES = Deadlines(open=2.0, verify=0.4, close=0.4, admission=20.0)
SECONDS = 90.0
"""A schedule takes about one, on a busy machine up to 30; one that hangs is a failure."""
REPORTED = 100
"""Schedules after which those that failed are printed."""


@dataclass(slots=True)
class Result:
    """What a schedule said."""

    seed: int
    history: list[Event] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    tokens: int = 0
    wrong_tokens: int = 0
    kills: int = 0
    command: str = "campaign"

    @property
    def faults(self) -> Counter[str]:
        return count_faults(self.history)

    def __str__(self) -> str:
        found = "\n  ".join([*map(str, self.violations[:5]), *(["..."] if self.violations[5:] else [])])
        return f"seed {self.seed}: {found}\n  again: python -m tests.reliability.{self.command} --seed {self.seed}"


async def _expire(service: TargetVerifierService, session_id: str) -> bool:
    """The lease of a session that nobody uses runs out now."""
    session = next((each for each in service.sessions if str(each.session_id) == session_id), None)
    if session is None or session.in_use:
        return False
    await let_expire(service, session)
    return True


PREFIX_PAGES = 3
ADAPTERS = ("", "", "red", "blue")


class Deployment:
    """The servers of one schedule; those that no client of it needs are not started."""

    def __init__(self, seed: int, stack: contextlib.AsyncExitStack) -> None:
        self.seed, self._stack = seed, stack
        self.chance = random.Random(f"deployment {seed}")
        self.history = History("servers")
        self.draft = f"salt=0,miss={self.chance.choice([0.0, 0.2, 0.5])}"
        self.slots = self.chance.randrange(2, 5)
        self.sites: list[Site] = []
        self._target: Site | None = None

    def _faults(self, number: int) -> FaultInterceptor:
        rate, in_a_row = self.chance.choice([0.1, 0.2, 0.3, 0.6]), self.chance.choice([1, 2, 5])
        return FaultInterceptor(Schedule(self.seed * 10 + number, rate, in_a_row), self.history)

    async def target(self) -> Site:
        if self._target is None:
            faults = self._faults(0)
            runner = toy(slots=self.slots, chunk=self.chance.choice([4, 16]))
            self._target = await self._enter(target_site(runner, interceptors=[faults]))
            service = self._target.verifier
            assert service is not None
            faults.expire = lambda session: _expire(service, session)
        return self._target

    async def worker(self) -> Site:
        target = await self.target()
        pipeline = self.chance.choice([Pipeline.OFF, Pipeline.AUTO, Pipeline.NEVER_WAITING])
        faults = [self._faults(1)]
        return await self._enter(
            worker_site(target.address, self.draft, interceptors=faults, pipeline=pipeline, deadlines=DEADLINES)
        )

    async def fused(self) -> Site:
        return await self._enter(
            fused_site(toy(slots=self.slots), toy(slots=self.slots), interceptors=[self._faults(2)])
        )

    async def _enter(self, site: Any) -> Site:
        entered: Site = await self._stack.enter_async_context(site)
        if engine := entered.engine:  # so few pages that they are replaced all the time
            assert isinstance(engine.runner, ToyRunner)
            engine.prefixes = PrefixCache(engine.runner, engine.runner.page_store(PREFIX_PAGES), PREFIX_PAGES)
            await with_adapters(engine, *(("red",) if entered.service == DRAFT else ()))
        self.sites.append(entered)
        return entered

    # --- the ways to ask ---

    async def wire(self, kind: Any, ask: Ask) -> Ended:
        target = await self.target()
        async with raw_stub(target.address) as stub:
            return await kind(stub, ask, random.Random(f"wire {self.seed} {ask.client}")).run()

    async def distributed(self, pipeline: Pipeline, ask: Ask) -> Ended:
        target = await self.target()
        async with distributed(target.address, self.draft, pipeline=pipeline) as (generator, client):
            client.deadlines = DEADLINES
            return await by_generate(generator.generate, ask, again=1)

    async def by_rejection(self, ask: Ask) -> Ended:
        """Tokens depend on drafts there, but every random number is seeded: faults change nothing."""
        ask = replace(ask, rule=Rule.REJECTION)
        async with target_site(toy()) as calm, distributed(calm.address, self.draft) as (generator, _):
            await with_adapters(calm.engine)
            undisturbed = await by_generate(generator.generate, ask, again=1)
        ended = await self.distributed(Pipeline.OFF, ask)
        return replace(ended, expected=tuple(undisturbed.tokens))

    async def generated(self, site: Callable[[], Awaitable[Site]], ask: Ask) -> Ended:
        async with (await site()).client() as client:
            return await by_generate(client.generate, ask)

    def ways(self) -> list[tuple[str, Callable[[Ask], Awaitable[Ended]]]]:
        """By name; the first six are chosen twice as often."""
        weighted: list[tuple[str, Any]] = [
            ("wire_unary", partial(self.wire, partial(WireClient, streams=False))),
            ("wire_stream", partial(self.wire, partial(WireClient, streams=True))),
            ("wire_run", partial(self.wire, WireRunClient)),
            ("distributed_unary", partial(self.distributed, Pipeline.OFF)),
            ("distributed_stream", partial(self.distributed, Pipeline.ON)),
            ("distributed_run", partial(self.distributed, Pipeline.NEVER_WAITING)),
        ]
        sites = (("plain", self.target), ("by_worker", self.worker), ("by_fused", self.fused))
        others = [(name, partial(self.generated, site)) for name, site in sites]
        return [*weighted, *weighted, *others, ("by_rejection", self.by_rejection)]


async def run_schedule(seed: int, seconds: float = SECONDS, only: Sequence[str] = ()) -> Result:
    """Servers, three clients, faults; everything they said checked. Never raises for what a schedule finds.

    `only`: names of the ways to ask; empty: all.
    """
    result = Result(seed)
    chance = random.Random(f"schedule {seed}")
    adapters = random.Random(f"adapters {seed}")
    asks = [replace(ask, adapter=adapters.choice(ADAPTERS)) for ask in wishes(chance, 3)]
    async with contextlib.AsyncExitStack() as stack:
        deployment = Deployment(seed, stack)
        await deployment.target()
        choices = [way for way in deployment.ways() if not only or way[0] in only]
        ways = [chance.choice(choices) for _ in asks]
        running = (asyncio.wait_for(way(ask), seconds) for (_, way), ask in zip(ways, asks, strict=True))
        ended = await asyncio.gather(*running, return_exceptions=True)
        for (name, _), ask, end in zip(ways, asks, ended, strict=True):
            end = Ended([], f"{type(end).__name__} {end}") if isinstance(end, BaseException) else end
            note_outcome(deployment.history, result, name, ask, end)
        result.violations += await _left_behind(deployment.sites, seconds)
        await _calls_end(deployment.history, seconds)
    by_client = {ask.client: ask for ask in asks}
    plain = [ask for (name, _), ask in zip(ways, asks, strict=True) if name != "by_rejection"]
    validator = Validator(
        lambda client, count: by_client[client].truth(count), {ask.client: len(ask.prompt) for ask in plain}
    )
    result.history = deployment.history.events
    result.violations += validator.check(result.history, all_ended=True)
    return result


def note_outcome(history: History, result: Result, way: str, ask: Ask, end: Ended) -> None:
    expected = list(ask.expected if end.expected is None else end.expected)
    history.outcome(ask.client, way=way, tokens=end.tokens, expected=expected, error=end.error)
    result.tokens += len(end.tokens)
    result.wrong_tokens += sum(ours != true for ours, true in zip(end.tokens, expected, strict=False))


async def _left_behind(sites: list[Site], seconds: float) -> list[Violation]:
    """Sessions whose client is gone lose their lease; then nothing may be held."""
    for site in sites:
        await let_all_expire(site)
    held: list[Violation] = []
    for site in sites:
        engine = site.engine
        try:
            await until(lambda engine=engine: engine is None or engine.slots.free == engine.slots.count, seconds)
        except AssertionError:
            held.append(Violation("answered", f"{site.service} holds {engine.slots.count - engine.slots.free} slots"))
        if engine and any(engine.adapters.users.values()):
            held.append(Violation("answered", f"{site.service}: users of adapters by number: {engine.adapters.users}"))
    return held


async def _calls_end(history: History, seconds: float) -> None:
    """Waits for calls whose client has left, such as delayed copies: a server records their end when they reach it.

    One that does not end within `seconds` is found by the validator.
    """

    def none_open() -> bool:
        validator = Validator(lambda client, count: [], {})
        validator.check(history.events, all_ended=False)
        return not validator.open_calls

    with contextlib.suppress(AssertionError):
        await until(none_open, seconds)


async def run_schedules(
    seeds: Iterable[int], run: Callable[[int], Awaitable[Result]] = run_schedule, at_once: int = 4
) -> list[Result]:
    """Several at once, each with servers of its own."""
    gate = asyncio.Semaphore(at_once)

    async def one(seed: int) -> Result:
        async with gate:
            return await run(seed)

    return list(await asyncio.gather(*map(one, seeds)))


def main() -> int:
    from tests.reliability.kills import run_kills

    parser = argparse.ArgumentParser(description="Runs fault schedules; prints what is wrong with them.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=(), help="ways to ask, such as wire_run or distributed_run")
    parser.add_argument("--kills", action="store_true", help="schedules with kill -9 of server processes")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    run = run_kills if arguments.kills else partial(run_schedule, only=arguments.only)
    end = arguments.seed + arguments.count
    faults, totals = Counter[str](), Counter[str]()
    for first in range(arguments.seed, end, REPORTED):
        for result in asyncio.run(run_schedules(range(first, min(first + REPORTED, end)), run)):
            if arguments.count == 1:
                print(*result.history, sep="\n")
            if result.violations:
                print(result, flush=True)
            faults += result.faults
            totals += Counter(tokens=result.tokens, wrong_tokens=result.wrong_tokens, kills=result.kills)
            totals += Counter(failed=bool(result.violations))
    print(f"{faults}\n{arguments.count} schedules, {faults.total()} faults; {dict(totals)}")
    return int(totals["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
