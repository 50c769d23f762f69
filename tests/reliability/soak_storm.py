"""What happens to a soak's clients and servers: SIGKILL, SIGSTOP, steps that hang, a server's return."""

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
from pathlib import Path
from typing import Any

from tests.reliability.processes import Killable
from tests.support import HANG, REPOSITORY

STOPPED = (1.0, 3.0)  # seconds for which a process is stopped
STEP_SECONDS = 2.0  # --step_seconds of all servers
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
