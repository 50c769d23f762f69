"""Tells how busy this machine is with other programs while a request is measured.

Linux tells it in /proc; other systems tell their load average alone. Only this machine is seen: servers that run
elsewhere have a load of their own.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SETTLING_SECONDS = 0.03
"""How long a server may take to finish what is left of the request before: that is no other program."""
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class MachineLoad:
    """How busy this machine was around one request. None: not known.

    load_average: of one minute, our own servers included. waiting: threads of other programs that ran or waited to run
    just before the request. others, steal: shares of the time of all cores that other programs had during the request,
    and that the host of this virtual machine took away.
    """

    load_average: float | None = None
    waiting: int | None = None
    others: float | None = None
    steal: float | None = None


@dataclass(frozen=True, slots=True)
class CoreTimes:
    """Clock ticks of all cores since the start of this machine, and those of this process and its children."""

    total: int
    busy: int
    steal: int
    own: int


@dataclass(frozen=True, slots=True)
class LoadWatch:
    """Watches from `started` until `ended`."""

    load_average: float | None
    waiting: int | None
    times: CoreTimes | None

    @classmethod
    async def started(cls, alone: bool = True) -> LoadWatch:
        """Starts. `alone`: no other request of ours is under way, so that whatever runs belongs to other programs."""
        waiting = _running() if alone else None
        if waiting:
            await asyncio.sleep(SETTLING_SECONDS)
            waiting = min(waiting, _running() or 0)
        return cls(_load_average(), waiting, _core_times())

    def ended(self, all_ours: bool = True) -> MachineLoad:
        """Ends. `all_ours`: this process started every server, so that their time can be told from that of others."""
        now = _core_times()
        if self.times is None or now is None or (total := now.total - self.times.total) <= 0:
            return MachineLoad(self.load_average, self.waiting)
        others = now.busy - self.times.busy - (now.own - self.times.own)
        shares = [min(1.0, max(0.0, ticks / total)) for ticks in (others, now.steal - self.times.steal)]
        return MachineLoad(self.load_average, self.waiting, shares[0] if all_ours else None, shares[1])


def _load_average() -> float | None:
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):
        return None


def _running() -> int | None:
    """Returns how many threads run or wait to run on this machine, without the one that asks."""
    for line in _text(PROC / "stat").splitlines():
        if line.startswith("procs_running "):
            return max(0, int(line.split()[1]) - 1)
    return None


def _core_times() -> CoreTimes | None:
    """Reads the clock ticks; None where the system does not tell them."""
    first = _text(PROC / "stat").partition("\n")[0].split()
    if len(first) < 9 or first[0] != "cpu":
        return None
    user, nice, system, idle, io_wait, irq, soft_irq, steal = map(int, first[1:9])
    busy = user + nice + system + irq + soft_irq
    return CoreTimes(busy + idle + io_wait + steal, busy, steal, sum(map(_ticks, _family(os.getpid()))))


def _family(pid: int) -> Iterator[int]:
    """Yields a process and all that descend from it."""
    yield pid
    for children in (PROC / str(pid) / "task").glob("*/children"):
        for child in _text(children).split():
            yield from _family(int(child))


def _ticks(pid: int) -> int:
    """Returns the ticks of a process and of those children that it has waited for; 0 if it is gone."""
    after_name = _text(PROC / str(pid) / "stat").rpartition(")")[2].split()
    return sum(map(int, after_name[11:15]))  # utime, stime, cutime, cstime: fields 14 to 17


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
