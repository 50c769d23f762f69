"""Servers under a storm of clients that come, leave, abandon sessions and are killed; then: does all come back?"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tandem.engine.structures import KEPT
from tandem.rpc.channel import DRAFT, FUSED, TARGET
from tandem.speculation.verification_mode import Pipeline
from tests.reliability.hostile_peers import Liar, changes, lying
from tests.reliability.processes import Killable
from tests.reliability.soak_client import LEASE
from tests.support import HANG, REPOSITORY

WARM_UP = 0.2  # share of the time before the first look: pools, caches and threads that come with the first requests
MAX_MORE = {"slots": 0, "sessions": 0, "tasks": 2, "threads": 2, "files": 4 + KEPT, "resident_bytes": 24 * 2**20}
"""How much more than before a server may hold afterwards; a compiled structure is kept behind a socket."""
NO_OPERATIONS = ("tokens", "wrong", "disturbed", "step hung", "refused")
PER_OPERATION = 16  # bytes that an operation may leave behind: fewer than any Python object has
ALLOWED = 2 * 2**20  # bytes by which memory may rise beside: arenas, caches of channels
FEWEST = 60  # samples that a line is fitted through: over seconds, arenas that grow look like a leak
STEP_SECONDS = 2.0  # --step_seconds of all servers
_COMMON = (
    *("--batch", "16", "--sequence_length", "96", "--step_seconds", str(STEP_SECONDS), "--drain_seconds", "1"),
    *("--prefix_cache_mb", "1"),  # soon full: what grows later is a leak
)
_ADAPTERS = ("--adapters", "red=red,blue=blue")
_DRAFT = ("--draft_model", "miss=0.3", "--draft_adapters", "red=red")
_LEASE = ("--lease_seconds", str(LEASE))


class Memory:
    """Resident bytes of each server, sampled every second."""

    def __init__(self) -> None:
        self.samples: dict[str, list[tuple[float, int]]] = {}

    async def sample_forever(self, servers: list[Killable]) -> None:
        while True:
            for server in servers:
                with contextlib.suppress(OSError, AttributeError, IndexError):  # it is being started again
                    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])  # type: ignore[union-attr]
                    sample = time.monotonic(), pages * os.sysconf("SC_PAGE_SIZE")
                    self.samples.setdefault(server.name, []).append(sample)
            await asyncio.sleep(1.0)

    def not_flat(self, name: str, operations: float) -> list[str]:
        """What is wrong if a line through the last half of the samples rises, after so many operations."""
        half = np.array(self.samples.get(name, [])[len(self.samples.get(name, [])) // 2 :], dtype=np.float64)
        if len(half) < FEWEST:
            return []
        rise = np.polyfit(half[:, 0] - half[0, 0], half[:, 1], 1)[0] * (half[-1, 0] - half[0, 0])
        most = ALLOWED + PER_OPERATION * operations / 2
        text = f"{name}: memory rose by {rise / 2**20:.1f} MiB in the last half; {most / 2**20:.1f} are stated"
        return [text] if rise > most else []


@dataclass(slots=True)
class Soaked:
    """A soak's results. `done`: to processes. `failures`: that nothing excuses. `before`, `after`: held by servers."""

    counts: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)
    before: dict[str, dict[str, int]] = field(default_factory=dict)
    after: dict[str, dict[str, int]] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)
    ends: list[str] = field(default_factory=list)  # processes that ended otherwise than they should, and tracebacks

    @property
    def operations(self) -> int:
        return sum(n for name, n in self.counts.items() if name not in NO_OPERATIONS)

    def wrongs(self) -> list[str]:
        found = [f"failed without a disturbance: {failed}" for failed in self.failures[:20]]
        found += self.ends
        if self.counts["wrong"]:
            found.append(f"{self.counts['wrong']} outputs with wrong tokens")
        for server, held in self.after.items():
            found += [f"{server} holds {held[what]} {what}" for what in ("slots", "sessions") if held[what]]
        for server, before in self.before.items():
            after = self.after[server]
            for what, most in MAX_MORE.items():
                if (more := after[what] - before[what]) > most:
                    tasks = {name: n for name, n in (Counter(after) - Counter(before)).items() if name[:5] == "task "}
                    found.append(f"{server} holds {more} {what} more than before; at most {most} is stated; {tasks}")
            found += self.memory.not_flat(server, self.operations)
        return found


class Fleet:
    """The servers: three that live through it, and a verifier that is killed. The worker verifies at both.

    Before both stands one that lies in every reply to the worker, each time otherwise.
    """

    def __init__(self, folder: Path) -> None:
        role = ("--role", "target", *_ADAPTERS, *_COMMON, *_LEASE)
        self.target, self.mortal = Killable(folder, "target", role), Killable(folder, "mortal", role)
        self.fused = Killable(folder, "fused", ("--role", "fused_target", *_DRAFT, *_ADAPTERS, *_COMMON))
        self.worker = Killable(folder, "worker", ())
        self.lasting = [self.target, self.fused, self.worker]
        self.all = [*self.lasting, self.mortal]
        self.lies = 0

    @contextlib.asynccontextmanager
    async def running(self, pipeline: Pipeline) -> Any:
        try:
            await asyncio.gather(self.target.start(), self.mortal.start(), self.fused.start())
            async with lying(self.target.address) as liar:
                verifiers = f"{liar.address},{self.mortal.address},{self.target.address}"
                role = ("--role", "draft_worker", *_DRAFT, *_COMMON, *_LEASE, "--target_host", verifiers)
                self.worker.arguments = (*role, "--pipeline", pipeline.value)
                await self.worker.start()
                lies = asyncio.create_task(self._lie_on(liar))
                try:
                    yield
                finally:
                    lies.cancel()
        finally:
            for server in self.all:
                server.end()

    async def _lie_on(self, liar: Liar) -> None:
        """Changes any field of a verdict or an opening but its tokens, which are a target's own to choose."""
        methods = ("Verify", "VerifyStream", "OpenSession", "CloseSession")
        known = [each for name in methods for each in changes(TARGET, name) if "token_ids" not in each.path]
        chance = random.Random(0)
        while True:
            liar.lie(chance.choice(known))
            await asyncio.sleep(0.5)
            self.lies += liar.told

    def addresses(self) -> dict[str, str]:
        services = {"target": TARGET, "mortal": TARGET, "fused": FUSED, "worker": DRAFT}
        return {f"{server.name}:{services[server.name]}": server.address for server in self.all}


async def soak(
    folder: Path, seconds: float, processes: int, between: float, seed: int = 0, pipeline: Pipeline = Pipeline.AUTO
) -> Soaked:
    """Soaks with 32 clients where `processes` is 4; one process is killed every `between` seconds."""
    fleet, soaked = Fleet(folder), Soaked()
    async with fleet.running(pipeline):
        storm = Storm(folder, fleet.addresses(), random.Random(seed))
        sampling = asyncio.create_task(soaked.memory.sample_forever(fleet.lasting))
        try:
            await storm.blow(seconds * WARM_UP, processes, between, fleet.mortal, fleet.all)
            soaked.before = {server.name: await quiet(server) for server in fleet.lasting}
            await storm.blow(seconds * (1 - WARM_UP), processes, between, fleet.mortal, fleet.all)
            soaked.after = {server.name: await quiet(server) for server in fleet.all}
        finally:
            storm.end()
            sampling.cancel()
            soaked.counts, soaked.failures = storm.counted()
            soaked.done, soaked.ends = storm.done + Counter(lies=fleet.lies), storm.wrongs
        for log in sorted(folder.glob("*.log")):
            text = log.read_text(errors="replace")
            if (at := text.find("Traceback")) >= 0:
                soaked.ends.append(f"{log.name} has a traceback: ...{text[max(0, at - 500) : at + 3000]}")
    return soaked


async def quiet(server: Killable, seconds: float = HANG / 2) -> dict[str, int]:
    """What a server holds after the last request: leases run out, connections are seen to be gone."""
    give_up = time.monotonic() + seconds
    least = await server.probe()
    while time.monotonic() < give_up:
        await asyncio.sleep(0.3)
        now = await server.probe()
        if now["slots"] == now["sessions"] == 0 and now["files"] == least["files"] and now["tasks"] == least["tasks"]:
            return now
        least = now
    return least


STOPPED = (1.0, 3.0)  # seconds for which a process is stopped
COMES_BACK = (0.7, 1.7)  # how long a step hangs before it returns, as a multiple of STEP_SECONDS
GIVEN_UP = 2.0  # multiple of STEP_SECONDS after which a server abandons a hung step and exits
EXCUSED = ("UNAVAILABLE", "NOT_FOUND")  # what a server that is out of order, or lost a session, may answer
AFTERWARDS = 5.0  # seconds after a disturbance in which its server may still refuse


def allowed_ends(seconds: float | None, lasted: float) -> tuple[int | None, ...]:
    """Exit statuses of a server (None: it runs on) whose step was to hang for `seconds` (None: for good).

    It hung for at most `lasted` seconds: for more than it was to if server or storm were late, as on a busy machine.
    """
    if seconds is None:
        return (1,)
    return (None,) if lasted < GIVEN_UP * STEP_SECONDS else (None, 1)


class Storm:
    """Client processes: some end by SIGTERM, some by SIGKILL, and others take their place.

    `servers`: address by name:service. `spans`: when (time.time()) which server was out of order.
    """

    def __init__(self, folder: Path, servers: dict[str, str], chance: random.Random) -> None:
        self._folder, self._chance = folder, chance
        self._servers = [f"{name}={address}" for name, address in servers.items()]
        self._running: list[subprocess.Popen[bytes]] = []
        self._made = 0
        self.spans: list[tuple[str, float, float]] = []
        self.done: Counter[str] = Counter()
        self.wrongs: list[str] = []

    def _fill(self, processes: int) -> None:
        while len(self._running) < processes:
            self._made += 1
            command = [sys.executable, "-m", "tests.reliability.soak_client", "--seed", str(self._made)]
            command += ["--counts", str(self._folder / f"client-{self._made}.jsonl"), *self._servers]
            with (self._folder / f"client-{self._made}.log").open("wb") as log:
                environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
                self._running.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))

    def end(self) -> None:
        for process in self._running:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in self._running:
            try:
                process.wait(HANG)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                self.wrongs.append("a client process did not end")
        self._running.clear()

    async def blow(
        self, seconds: float, processes: int, between: float, mortal: Killable, all_: list[Killable]
    ) -> None:
        """Clients lose a process every `between` seconds; every second time something else happens too.

        A client or one of `all_` stands still; a step of one of them hangs and comes back; `mortal` is killed, or a
        step of it hangs for good, and it is started again on its port.
        """
        end, turn = time.monotonic() + seconds, 0
        self._fill(processes)
        while (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(left, between))
            if end - time.monotonic() <= 0.5:
                continue
            victim = self._running.pop(self._chance.randrange(len(self._running)))
            victim.kill()
            victim.wait()
            self.done["client processes killed"] += 1
            turn += 1
            if turn % 2 == 0:
                await self._disturb((turn // 2) % 5, mortal, all_)
            self._fill(processes)
        self.end()

    async def _disturb(self, kind: int, mortal: Killable, all_: list[Killable]) -> None:
        if kind == 0:
            await self._stop(self._chance.choice(self._running))
            self.done["client processes stopped"] += 1
            return
        server, began = (mortal if kind in (2, 3) else self._chance.choice(all_)), time.time()
        self.spans.append((server.name, began, float("inf")))
        if kind == 1:
            await self._hang(server, STEP_SECONDS * self._chance.uniform(*COMES_BACK))
        elif kind == 2:
            await server.kill()
            await server.start()
            self.done["servers killed"] += 1
        elif kind == 3:
            await self._hang(server, None)
        elif server.process:
            await self._stop(server.process)
            self.done["servers stopped"] += 1
        self.spans[-1] = (server.name, began, time.time())

    async def _stop(self, process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(self._chance.uniform(*STOPPED))
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)

    async def _hang(self, server: Killable, seconds: float | None) -> None:
        status, lasted = await server.hang(seconds)
        self.done["steps hung" if seconds else "steps hung for good"] += 1
        if status not in allowed_ends(seconds, lasted):
            log = "\n".join(server.log.read_text(errors="replace").splitlines()[-20:])
            self.wrongs.append(f"{server.name}: a step hung for {lasted:.2f} s, and it ended with {status}:\n{log}")
        if status is not None:
            await server.start()

    def excuses(self, failed: dict[str, Any]) -> bool:
        """Whether a disturbance of the operation's own server excuses its failure.

        A worker's is not excused if a verifier is out of order: there is another.
        """
        return failed["code"] in EXCUSED and any(
            failed["server"] == name and begins <= failed["ended"] and failed["began"] <= ends + AFTERWARDS
            for name, begins, ends in self.spans
        )

    def counted(self) -> tuple[Counter[str], list[dict[str, Any]]]:
        """All counts, and the failures that no disturbance excuses."""
        total, failures = Counter[str](), list[dict[str, Any]]()
        for path in self._folder.glob("client-*.jsonl"):
            counts: dict[str, int] = {}
            for line in path.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # a client that was killed may leave half a line
                    read = json.loads(line)
                    counts = read.get("counts", counts)
                    if failed := read.get("failed"):
                        excused = self.excuses(failed)
                        total["disturbed"] += excused
                        total["step hung"] += excused and failed["reason"] == "STEP_HUNG"
                        failures += [] if excused else [failed]
            total.update(counts)
        return total, failures
