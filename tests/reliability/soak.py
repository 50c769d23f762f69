"""Servers under a storm of clients that come, leave, abandon sessions and are killed; then: does everything come back?

python -m tests.reliability.soak --seconds 600        prints the figures
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from clients.channel import DRAFT, FUSED, TARGET
from tests.reliability.processes import Killable
from tests.reliability.soak_client import CLIENTS
from tests.support import REPOSITORY

LEASE = 0.5
WARM_UP = 0.2  # share of the time before the first look: pools, caches and threads that come with the first requests
MOST_MORE = {"slots": 0, "sessions": 0, "tasks": 2, "threads": 2, "files": 4, "resident_bytes": 24 * 2**20}
"""How much more than before a server may hold afterwards."""
_COMMON = ("--batch", "16", "--sequence_length", "96")
_LEASE = ("--lease_seconds", str(LEASE))


@dataclass(slots=True)
class Soaked:
    """What a soak said."""

    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    before: dict[str, dict[str, int]] = field(default_factory=dict)
    after: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def operations(self) -> int:
        return sum(n for name, n in self.counts.items() if name not in ("tokens", "wrong"))

    def wrongs(self) -> list[str]:
        """What must not be."""
        found = [f"{n} times {name}" for name, n in self.counts.items() if name.startswith("failed")]
        if self.counts["wrong"]:
            found.append(f"{self.counts['wrong']} outputs with wrong tokens")
        for server, held in self.after.items():
            for what, most in MOST_MORE.items():
                more = held[what] - self.before[server][what]
                if more > most:
                    found.append(f"{server} holds {more} {what} more than before; at most {most} is stated")
        return found


class Storm:
    """Client processes: some end by SIGTERM, some by SIGKILL, and others take their place."""

    def __init__(self, folder: Path, servers: dict[str, str], chance: random.Random) -> None:
        self._folder, self._chance = folder, chance
        self._servers = [f"{service}={address}" for service, address in servers.items()]
        self._running: list[subprocess.Popen[bytes]] = []
        self._made = 0
        self.kills = 0

    def fill(self, processes: int) -> None:
        while len(self._running) < processes:
            self._made += 1
            command = [sys.executable, "-m", "tests.reliability.soak_client", "--seed", str(self._made)]
            command += ["--counts", str(self._folder / f"client-{self._made}.jsonl"), *self._servers]
            log = (self._folder / f"client-{self._made}.log").open("wb")
            environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
            self._running.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
            log.close()

    def kill_one(self) -> None:
        victim = self._running.pop(self._chance.randrange(len(self._running)))
        victim.kill()
        victim.wait()
        self.kills += 1

    def end(self) -> None:
        for process in self._running:
            process.terminate()
        for process in self._running:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._running.clear()

    async def blow(self, seconds: float, processes: int, between_kills: float) -> None:
        end = time.monotonic() + seconds
        self.fill(processes)
        while (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(left, between_kills))
            if end - time.monotonic() > 0.5:
                self.kill_one()
                self.fill(processes)
        self.end()

    def counted(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for path in self._folder.glob("client-*.jsonl"):
            lines = path.read_text().splitlines()
            total.update(json.loads(lines[-1]) if lines else {})
        return total


async def soak(folder: Path, seconds: float, processes: int, between_kills: float, seed: int = 0) -> Soaked:
    """32 clients where `processes` is 4. Raises AssertionError where a server dies or holds on to something."""
    target = Killable(folder, "target", ("--role", "target", *_COMMON, *_LEASE))
    fused = Killable(folder, "fused", ("--role", "fused_target", "--draft_model", "miss=0.3", *_COMMON))
    servers = [target, fused]
    soaked = Soaked(seconds)
    try:
        await asyncio.gather(target.start(), fused.start())
        worker_arguments = ("--role", "draft_worker", "--draft_model", "miss=0.3", *_COMMON, *_LEASE)
        worker = Killable(folder, "worker", (*worker_arguments, "--target_host", target.address))
        servers.append(worker)
        await worker.start()
        addresses = {TARGET: target.address, FUSED: fused.address, DRAFT: worker.address}
        storm = Storm(folder, addresses, random.Random(seed))
        try:
            await storm.blow(seconds * WARM_UP, processes, between_kills)
            soaked.before = {server.name: await quiet(server) for server in servers}
            await storm.blow(seconds * (1 - WARM_UP), processes, between_kills)
            soaked.after = {server.name: await quiet(server) for server in servers}
        finally:
            storm.end()
        soaked.counts, soaked.kills = storm.counted(), storm.kills
        for server in servers:
            assert "Traceback" not in (said := server.log.read_text(errors="replace")), said[-3000:]
    finally:
        for server in servers:
            server.end()
    return soaked


async def quiet(server: Killable, seconds: float = 20.0) -> dict[str, int]:
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
    parser = argparse.ArgumentParser(description="Soaks the three servers and prints what they hold before and after.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--between-kills", type=float, default=3.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        soaked = asyncio.run(soak(Path(folder), arguments.seconds, arguments.processes, arguments.between_kills))
    print(f"{soaked.operations} operations of {arguments.processes * CLIENTS} clients: {dict(soaked.counts)}")
    for name in soaked.before:
        print(f"{name}: before {soaked.before[name]}, after {soaked.after[name]}")
    print(*soaked.wrongs(), sep="\n")
    return int(bool(soaked.wrongs()))


if __name__ == "__main__":
    sys.exit(main())
