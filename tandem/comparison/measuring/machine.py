"""Describes the machine and the software of a run, and measures the load of other programs, from Linux's /proc."""

from __future__ import annotations

import asyncio
import os
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tandem.host.cores import usable_cores
from tandem.host.host import LIBRARIES, first_processor, name_of
from tandem.host.packages import installed_version

SETTLING_SECONDS = 0.03  # a server may still be finishing the request before
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Machine:
    """The driver's machine and software; connected servers may run elsewhere."""

    system: str
    architecture: str
    processor: str
    usable_cores: int
    memory_bytes: int | None
    python: str
    packages: dict[str, str] = field(default_factory=dict)
    git_commit: str | None = None

    def __str__(self) -> str:
        memory = f", {self.memory_bytes / 2**30:.0f} GiB" if self.memory_bytes else ""
        return f"{self.processor}, {self.usable_cores} cores{memory}, {self.system}"


def this_machine() -> Machine:
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        architecture=platform.machine(),
        processor=name_of(first_processor()),
        usable_cores=usable_cores(),
        memory_bytes=_memory_bytes(),
        python=platform.python_version(),
        packages={name: version for name in LIBRARIES if (version := installed_version(name))},
        git_commit=_git_commit(),
    )


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _git_commit() -> str | None:
    """Returns this checkout's commit, with "-dirty" if files differ."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


@dataclass(frozen=True, slots=True)
class MachineLoad:
    """This machine's load around one request. None: unknown."""

    load_average: float | None = None  # of one minute, our servers included
    waiting: int | None = None  # other programs' runnable threads just before the request
    others: float | None = None  # other programs' share of all cores' time
    steal: float | None = None  # share that the host of this virtual machine took


@dataclass(frozen=True, slots=True)
class LoadWatch:
    """The state when watching started: waiting threads of others, and clock ticks of all cores since boot."""

    waiting: int | None
    total: int  # 0: unknown, as the others are
    busy: int
    steal: int
    own: int  # of this process and its children

    @classmethod
    async def started(cls, alone: bool = True) -> LoadWatch:
        """Starts. `alone`: no other request of ours runs, so runnable threads belong to other programs."""
        waiting = _running() if alone else None
        if waiting:
            await asyncio.sleep(SETTLING_SECONDS)
            waiting = min(waiting, _running() or 0)
        return cls(waiting, *_core_ticks())

    def ended(self, all_ours: bool = True) -> MachineLoad:
        """Ends. `all_ours`: this process started every server, so their time can be subtracted."""
        (total, busy, steal, own), average = _core_ticks(), os.getloadavg()[0]
        if not self.total or total <= self.total:
            return MachineLoad(average, self.waiting)
        others = busy - self.busy - (own - self.own)
        shares = [min(1.0, max(0.0, ticks / (total - self.total))) for ticks in (others, steal - self.steal)]
        return MachineLoad(average, self.waiting, shares[0] if all_ours else None, shares[1])


def _running() -> int | None:
    """Returns the runnable threads of this machine without the caller."""
    _, found, rest = _text(PROC / "stat").partition("\nprocs_running ")
    return max(0, int(rest.split()[0]) - 1) if found else None


def _core_ticks() -> tuple[int, int, int, int]:
    """Returns the ticks of LoadWatch."""
    first = _text(PROC / "stat").partition("\n")[0].split()
    if len(first) < 9 or first[0] != "cpu":
        return 0, 0, 0, 0
    user, nice, system, idle, io_wait, irq, soft_irq, steal = map(int, first[1:9])
    busy = user + nice + system + irq + soft_irq
    return busy + idle + io_wait + steal, busy, steal, sum(map(_ticks, _family(os.getpid())))


def _family(pid: int) -> Iterator[int]:
    yield pid
    for children in (PROC / str(pid) / "task").glob("*/children"):
        for child in _text(children).split():
            yield from _family(int(child))


def _ticks(pid: int) -> int:
    """Returns the ticks of a process and its reaped children; 0 if it is gone."""
    after_name = _text(PROC / str(pid) / "stat").rpartition(")")[2].split()
    return sum(map(int, after_name[11:15]))  # utime, stime, cutime, cstime: fields 14 to 17


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
