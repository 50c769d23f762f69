"""One schedule with kill -9: real server processes, clients in this one, servers killed once so many tokens are there.

python -m tests.reliability.campaign --kills --seed 4        runs that schedule again and prints its history
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tandem.rpc.channel import DRAFT, TARGET
from tandem.rpc.generation_client import GenerationClient
from tandem.rpc.verifier_client import Deadlines
from tandem.speculation.types import Chunk
from tandem.speculation.verification_mode import Pipeline
from tests.reliability.campaign import Result, note_outcome
from tests.reliability.history import History, read
from tests.reliability.processes import Killable
from tests.reliability.traffic import Ask, Ended, WireClient, WireRunClient, by_generate, wishes
from tests.reliability.validator import Validator, Violation
from tests.support import distributed, raw_stub, until

DEADLINES = Deadlines(open=5.0, verify=1.5, close=0.5, admission=30.0)
SECONDS = 60.0
TARGET_ROLE = ("--role", "target", "--model", "step=0.004", "--batch", "4", "--sequence_length", "160")


@dataclass(slots=True)
class Progress:
    """Tokens that clients have seen: what kills are timed by, so that they come in the middle whatever the machine."""

    tokens: int = 0

    async def watched(self, events: Any) -> AsyncIterator[Any]:
        async for event in events:
            if isinstance(event, Chunk):
                self.tokens += len(event.token_ids)
            yield event


class KillSchedule:
    """Which servers there are, who asks how, and who is killed when, by seed."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed, self.folder = seed, folder
        self.chance = random.Random(f"kills {seed}")
        self.kind = ("restart", "failover", "worker", "remote draft")[seed % 4]
        self.asks = wishes(self.chance, 4, least=20)
        self.progress = Progress()
        self.kills = 0
        self.servers = [Killable(folder, "a", TARGET_ROLE, seed)]
        if self.kind == "failover":
            self.servers.append(Killable(folder, "b", TARGET_ROLE, seed + 1))

    async def start(self) -> None:
        await asyncio.gather(*(server.start() for server in self.servers))
        first = self.servers[0]
        if self.kind == "worker":
            way = Pipeline.NEVER_WAITING if self.seed // 4 % 2 else Pipeline.AUTO
            role = ("--role", "draft_worker", "--target_host", first.address, "--pipeline", way.value)
            self.servers.append(Killable(self.folder, "w", role))
        if self.kind == "remote draft":
            worker = Killable(self.folder, "w", ("--role", "draft_worker", "--propose_only"), self.seed)
            await worker.start()
            rest = ("--draft_host", worker.address, "--draft_seconds", "1")
            self.servers += [worker, Killable(self.folder, "t", (*TARGET_ROLE, *rest))]
        if self.kind in ("worker", "remote draft"):
            await self.servers[-1].start()

    @property
    def victim(self) -> Killable:
        return self.servers[1] if self.kind == "remote draft" else self.servers[0]

    async def kill(self) -> None:
        """Once, twice: after so many tokens; then it comes back on the same port."""
        total = sum(len(ask.expected) for ask in self.asks)
        for share in sorted(self.chance.choice([[0.3], [0.15, 0.5], [0.1, 0.6]])):
            with contextlib.suppress(AssertionError):  # clients that were done before are no reason to fail
                await until(lambda share=share: self.progress.tokens >= share * total, 20.0)
            await self.victim.kill()
            self.kills += 1
            await asyncio.sleep(self.chance.uniform(0, 0.2))
            await self.victim.start()

    def way(self, ask: Ask) -> Callable[[Ask], Awaitable[Ended]]:
        if self.kind == "worker":
            return lambda ask: self._generated(self.servers[-1].address, DRAFT, ask)
        if self.kind == "remote draft":
            return lambda ask: self._generated(self.servers[-1].address, TARGET, ask)
        pipelines = (Pipeline.OFF, Pipeline.ON, Pipeline.NEVER_WAITING)
        choices: list[Any] = [partial(self._distributed, pipeline) for pipeline in pipelines]
        if self.kind == "restart":
            wire = partial(WireClient, streams=False), partial(WireClient, streams=True), WireRunClient
            choices += [partial(self._wire, each) for each in wire]
        return choices[(ask.client + self.seed) % len(choices)]

    async def _distributed(self, pipeline: Pipeline, ask: Ask) -> Ended:
        verifiers = ",".join(server.address for server in self.servers)
        there = distributed(verifiers, "salt=0,miss=0.3", pipeline=pipeline, reconnect_seconds=30.0)
        async with there as (generator, client):
            client.deadlines = DEADLINES
            return await by_generate(lambda request: self.progress.watched(generator.generate(request)), ask, again=1)

    async def _wire(self, kind: Any, ask: Ask) -> Ended:
        async with raw_stub(self.victim.address) as stub:
            chance = random.Random(f"wire {self.seed} {ask.client}")
            client = kind(stub, ask, chance, seconds=1.5, patience=400, pause=0.05)
            client.on_tokens = self._counted
            return await client.run()

    def _counted(self, tokens: int) -> None:
        self.progress.tokens += tokens

    async def _generated(self, address: str, service: str, ask: Ask) -> Ended:
        async with GenerationClient.connect(address, service) as client:
            return await by_generate(
                lambda request: self.progress.watched(client.generate(request)), ask, again=400, pause=0.05
            )


async def run_kills(seed: int) -> Result:
    """Servers, clients, kills; everything checked. Never raises for what a schedule finds."""
    with tempfile.TemporaryDirectory() as folder:
        return await _run(KillSchedule(seed, Path(folder)))


async def _run(schedule: KillSchedule) -> Result:
    result, history = Result(schedule.seed, command="campaign --kills"), History("clients")
    try:
        await schedule.start()
        killing = asyncio.create_task(schedule.kill())
        running = (asyncio.wait_for(schedule.way(ask)(ask), SECONDS) for ask in schedule.asks)
        ended = await asyncio.gather(*running, return_exceptions=True)
        await killing
        for ask, end in zip(schedule.asks, ended, strict=True):
            end = Ended([], f"{type(end).__name__} {end}") if isinstance(end, BaseException) else end
            note_outcome(history, result, schedule.kind, ask, end)
    except AssertionError as error:
        result.violations.append(Violation("finished", f"a server did not start: {error}"))
    finally:
        for server in schedule.servers:
            server.end()
    result.kills = schedule.kills
    _check(schedule, result, history)
    return result


def _check(schedule: KillSchedule, result: Result, history: History) -> None:
    """Each life's history by itself: what was under way when it was killed has no end."""
    by_client = {ask.client: ask for ask in schedule.asks}
    prompts = {ask.client: len(ask.prompt) for ask in schedule.asks}
    for path in (path for server in schedule.servers for path in server.histories if path.exists()):
        validator = Validator(lambda client, count: by_client[client].truth(count), prompts)
        events = read(path)
        result.history += events
        result.violations += validator.check(events, all_ended=False)
    result.history += history.events
    result.violations += Validator(lambda client, count: [], {}).check(history.events)
    for log in schedule.folder.glob("*.log"):
        if "Traceback" in (text := log.read_text(errors="replace")):
            result.violations.append(Violation("refusal", f"a traceback in a server's log: {text[-1500:]}"))
