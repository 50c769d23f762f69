"""Servers under a storm of clients that come, leave, abandon sessions and are killed; then: does everything come back?

python -m tests.reliability.soak --seconds 3600        prints figures; results/soak-memory.png shows memory by time
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.engine.structures import KEPT
from tandem.rpc.channel import DRAFT, FUSED, TARGET
from tandem.speculation.verification_mode import Pipeline
from tests.reliability.hostile_peers import Liar, changes, lying
from tests.reliability.processes import Killable
from tests.reliability.soak_client import CLIENTS, LEASE
from tests.reliability.soak_memory import Memory
from tests.reliability.soak_storm import STEP_SECONDS, Storm
from tests.support import HANG, REPOSITORY

WARM_UP = 0.2  # share of the time before the first look: pools, caches and threads that come with the first requests
MAX_MORE = {"slots": 0, "sessions": 0, "tasks": 2, "threads": 2, "files": 4 + KEPT, "resident_bytes": 24 * 2**20}
"""How much more than before a server may hold afterwards; a compiled structure is kept behind a socket."""
NO_OPERATIONS = ("tokens", "wrong", "disturbed", "step hung", "expired", "refused")
EVERY = 15.0
"""Seconds between two lines of progress."""
RESULTS = REPOSITORY / "results"
_COMMON = (
    *("--batch", "16", "--sequence_length", "96", "--step_seconds", str(STEP_SECONDS), "--drain_seconds", "1"),
    *("--prefix_cache_mb", "1"),  # soon full: what grows later is a leak
)
_ADAPTERS = ("--adapters", "red=red,blue=blue")
_DRAFT = ("--draft_model", "miss=0.3", "--draft_adapters", "red=red")
_LEASE = ("--lease_seconds", str(LEASE))
Say = Callable[[str], None]


@dataclass(slots=True)
class Soaked:
    """What a soak said."""

    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    """What was done to processes."""
    failures: list[dict[str, Any]] = field(default_factory=list)
    before: dict[str, dict[str, int]] = field(default_factory=dict)
    after: dict[str, dict[str, int]] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)
    tracebacks: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    """Processes that ended otherwise than they should."""

    @property
    def operations(self) -> int:
        """Those that came to their end."""
        return sum(n for name, n in self.counts.items() if name not in NO_OPERATIONS)

    def wrongs(self) -> list[str]:
        """What must not be."""
        found = [f"failed without a disturbance: {failed}" for failed in self.failures[:20]]
        found += self.ends
        found += [f"a log has a traceback: {said}" for said in self.tracebacks[:5]]
        if self.counts["wrong"]:
            found.append(f"{self.counts['wrong']} outputs with wrong tokens")
        for server, held in self.after.items():
            found += [f"{server} holds {held[what]} {what}" for what in ("slots", "sessions") if held[what]]
        for server in self.before:
            for what, most in MAX_MORE.items():
                more = self.after[server][what] - self.before[server][what]
                if more > most:
                    found.append(f"{server} holds {more} {what} more than before; at most {most} is stated")
                    found[-1] += f": {self._more_tasks(server)}" if what == "tasks" else ""
            found += filter(None, [self.memory.not_flat(server, self.operations)])
        return found

    def _more_tasks(self, server: str) -> dict[str, int]:
        """Tasks that there were fewer of before, by what they do."""
        after, before = Counter(self.after[server]), Counter(self.before[server])
        return {name: more for name, more in (after - before).items() if name.startswith("task ")}


class Fleet:
    """The servers: three that live through it, and a verifier that is killed. The worker verifies at both.

    Before both stands one that lies in every reply to the worker, each time otherwise.
    """

    def __init__(self, folder: Path, pipeline: Pipeline) -> None:
        self._pipeline, self._beside = pipeline, contextlib.AsyncExitStack()
        self._lying: asyncio.Task[None] | None = None
        self.lies = 0
        role = ("--role", "target", *_ADAPTERS, *_COMMON, *_LEASE)
        self.target, self.mortal = Killable(folder, "target", role), Killable(folder, "mortal", role)
        self.fused = Killable(folder, "fused", ("--role", "fused_target", *_DRAFT, *_ADAPTERS, *_COMMON))
        self.worker = Killable(folder, "worker", ())

    async def start(self) -> None:
        await asyncio.gather(self.target.start(), self.mortal.start(), self.fused.start())
        liar = await self._beside.enter_async_context(lying(self.target.address))
        self._lying = asyncio.create_task(self._lie_on(liar))
        verifiers = f"{liar.address},{self.mortal.address},{self.target.address}"
        role = ("--role", "draft_worker", *_DRAFT, *_COMMON, *_LEASE, "--target_host", verifiers)
        self.worker.arguments = (*role, "--pipeline", self._pipeline.value)
        await self.worker.start()

    async def _lie_on(self, liar: Liar) -> None:
        """Changes what is said of a verdict or an opening but its tokens, which are a target's own to choose."""
        known = [
            change
            for method in ("Verify", "VerifyStream", "OpenSession", "CloseSession")
            for change in changes(TARGET, method)
            if "token_ids" not in change.path
        ]
        chance = random.Random(0)
        while True:
            liar.lie(chance.choice(known))
            await asyncio.sleep(0.5)
            self.lies += liar.told

    @property
    def lasting(self) -> list[Killable]:
        return [self.target, self.fused, self.worker]

    @property
    def all(self) -> list[Killable]:
        return [*self.lasting, self.mortal]

    def addresses(self) -> dict[str, str]:
        services = {"target": TARGET, "mortal": TARGET, "fused": FUSED, "worker": DRAFT}
        return {f"{server.name}:{services[server.name]}": server.address for server in self.all}

    def processes(self) -> dict[str, int]:
        return {server.name: server.process.pid for server in self.all if server.process}

    async def end(self) -> None:
        if self._lying:
            self._lying.cancel()
        await self._beside.aclose()
        for server in self.all:
            server.end()


async def soak(
    folder: Path,
    seconds: float,
    processes: int,
    between: float,
    seed: int = 0,
    results: Path | None = None,
    say: Say = lambda line: None,
    pipeline: Pipeline = Pipeline.AUTO,
) -> Soaked:
    """Soaks with 32 clients where `processes` is 4; one process is killed every `between` seconds.

    Samples of memory and a plot go to `results` as they come. `pipeline` is the worker's. Raises AssertionError where a
    server does not start.
    """
    fleet, soaked = Fleet(folder, pipeline), Soaked(seconds)
    if results:
        results.mkdir(parents=True, exist_ok=True)
        soaked.memory.file = results / time.strftime("soak-memory-%Y%m%dT%H%M%SZ.jsonl", time.gmtime())
    try:
        await fleet.start()
        storm = Storm(folder, fleet.addresses(), random.Random(seed))
        beside = [asyncio.create_task(soaked.memory.sample_forever(fleet.processes))]
        beside.append(asyncio.create_task(_progress(storm, soaked, say)))
        try:
            blow = functools.partial(storm.blow, processes=processes, between=between, mortal=fleet.mortal)
            await blow(seconds * WARM_UP, stopped=fleet.all)
            soaked.before = {server.name: await quiet(server) for server in fleet.lasting}
            await blow(seconds * (1 - WARM_UP), stopped=fleet.all)
            soaked.after = {server.name: await quiet(server) for server in fleet.all}
        finally:
            storm.end()
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            (soaked.counts, soaked.failures), soaked.done = storm.counted(), storm.done
            soaked.ends = storm.wrongs
            if results:
                asked = f"{seconds:g} s, {processes * CLIENTS} clients, {soaked.operations} operations"
                title = f"{asked}: " + ", ".join(f"{n} {what}" for what, n in soaked.done.items())
                lasting = [server.name for server in fleet.lasting]
                soaked.memory.plot(results / "soak-memory.png", title, lasting)
        soaked.tracebacks = list(tracebacks(folder))
    finally:
        soaked.done["lies"] = fleet.lies
        await fleet.end()
    return soaked


async def _progress(storm: Storm, soaked: Soaked, say: Say) -> None:
    began = time.monotonic()
    while True:
        await asyncio.sleep(EVERY)
        counts, failures = await asyncio.to_thread(storm.counted)
        now = Soaked(counts=counts)
        resident = {name: f"{samples[-1][1] / 2**20:.1f}" for name, samples in soaked.memory.samples.items()}
        say(
            f"{time.monotonic() - began:.0f} of {soaked.seconds:g} s: {now.operations} operations, "
            f"{counts['tokens']} tokens, {counts['wrong']} wrong, {len(failures)} failed, {counts['refused']} refused, "
            f"{counts['disturbed']} disturbed ({counts['step hung']} by hung steps); {dict(storm.done)}; MiB {resident}"
        )


def tracebacks(folder: Path) -> Iterator[str]:
    """Of all logs, servers' and clients': the first of each, with a little of what comes before."""
    for log in sorted(folder.glob("*.log")):
        text = log.read_text(errors="replace")
        if (at := text.find("Traceback")) >= 0:
            yield f"{log.name}: ...{text[max(0, at - 500) : at + 3000]}"


async def quiet(server: Killable, seconds: float = HANG / 2) -> dict[str, int]:
    """What a server holds once nobody asks any more: leases run out, connections are seen to be gone."""
    give_up = time.monotonic() + seconds
    least = await server.probe()
    while time.monotonic() < give_up:
        await asyncio.sleep(0.3)
        now = await server.probe()
        if now["slots"] == now["sessions"] == 0 and now["files"] == least["files"] and now["tasks"] == least["tasks"]:
            return now
        least = now
    return least


def main() -> int:
    parser = argparse.ArgumentParser(description="Soaks four servers and prints what they hold before and after.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--between-kills", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pipeline", choices=[way.value for way in Pipeline], default="auto", help="the worker's")
    arguments = parser.parse_args()
    say = functools.partial(print, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        soaked = asyncio.run(
            soak(
                Path(folder),
                arguments.seconds,
                arguments.processes,
                arguments.between_kills,
                arguments.seed,
                RESULTS,
                say,
                Pipeline(arguments.pipeline),
            )
        )
    print(f"{soaked.operations} operations of {arguments.processes * CLIENTS} clients: {dict(soaked.counts)}")
    print(f"done to processes: {dict(soaked.done)}")
    for name in soaked.before:
        rise = soaked.memory.rise(name) / 2**20
        print(f"{name}: before {soaked.before[name]}, after {soaked.after[name]}, {rise:+.2f} MiB in the last half")
    print(*soaked.wrongs(), sep="\n")
    with contextlib.suppress(BrokenPipeError):
        print("wrong" if soaked.wrongs() else "nothing wrong, nothing held", flush=True)
    return int(bool(soaked.wrongs()))


if __name__ == "__main__":
    sys.exit(main())
