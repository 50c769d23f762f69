"""Core lists such as `0-3,8`, and what this process and its control groups (version 1 or 2) may use."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

MAX_CORE = 4095


def parse_cores(text: str, flag: str = "cores") -> tuple[int, ...]:
    """The cores of a list such as `0-3,8`, in its order. Raises ValueError."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() if dash else True)):
            raise ValueError(f"{flag}: {text!r} is not a list of cores, as in 0-3 or 0,2")
        low, high = int(first), int(last or first)
        if not low <= high <= MAX_CORE:
            raise ValueError(f"{flag}: {part.strip()} is not a range of cores")
        found += range(low, high + 1)
    if len(set(found)) < len(found):
        raise ValueError(f"{flag}: a core of {text!r} is named twice")
    return tuple(found)


def format_cores(cores: Sequence[int]) -> str:
    """The list as text; three or more consecutive cores become a range."""
    parts: list[str] = []
    run: list[int] = []
    for core in (*cores, None):
        if run and core == run[-1] + 1:
            run.append(core)
            continue
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(one) for one in run]
        run = [] if core is None else [core]
    return ",".join(parts)


def share_of(cores: Sequence[int], rank: int, degree: int) -> tuple[int, ...]:
    """The cores of one of `degree` ranks. Raises ValueError unless the shares are equal."""
    each, rest = divmod(len(cores), degree)
    if rest or not each:
        raise ValueError(f"cores: {len(cores)} of them cannot be divided among {degree} ranks")
    return tuple(cores[rank * each : (rank + 1) * each])


def usable_cores(root: Path = Path("/")) -> int:
    """Number of cores by this process's affinity and its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, cpu_quota(root) or cores)


def default_threads(root: Path = Path("/")) -> int:
    """Threads of one process: OMP_NUM_THREADS, or one per physical core, at most `usable_cores`."""
    given = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if given.isdecimal() and int(given):
        return int(given)
    usable = usable_cores(root)
    if not hasattr(os, "sched_getaffinity"):
        return usable
    cores = set()
    for cpu in os.sched_getaffinity(0):
        file = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            cores.add(file.read_text(encoding="ascii").strip())
        except OSError:
            cores.add(str(cpu))
    return max(1, min(len(cores), usable))


def cpu_quota(root: Path = Path("/")) -> int | None:
    """Processors of the tightest group's quota, rounded up; None without one."""
    found = []
    for folder in _groups("cpu", root):
        with contextlib.suppress(OSError, ValueError, IndexError):  # not of this version, or "max"
            quota, period = map(int, (folder / "cpu.max").read_text().split())
            found.append(-(-quota // period))
        with contextlib.suppress(OSError, ValueError):
            quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            found += [-(-quota // period)] if quota > 0 else []  # -1: none
    return max(1, min(found)) if found else None


def free_bytes(root: Path = Path("/")) -> int | None:
    """Bytes left by the system or the tightest group; None if unknown (not Linux)."""
    if (free := meminfo("MemAvailable", root)) is None:
        return None
    names = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    found = [free]
    for folder in _groups("memory", root):
        for limit, used in names:
            with contextlib.suppress(OSError, ValueError):  # not of this version, or "max"
                found.append(int((folder / limit).read_text()) - int((folder / used).read_text()))
    return max(0, min(found))


def meminfo(name: str, root: Path = Path("/")) -> int | None:
    """Bytes of a line of /proc/meminfo; None if unknown."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def given_on_demand() -> bool:
    """Whether released pages read as zeros: on Linux they do."""
    return sys.platform == "linux"


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Folders of the process's groups and of all visible groups around them."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    mine = {name: path for _, names, path in (line.split(":", 2) for line in groups) for name in names.split(",")}
    for mount in mounts:  # "31 23 0:28 /in/the/system /on/disk rw - cgroup2 source rw,options"
        placed, _, kind = mount.partition(" - ")
        (top, place), (system, *_, options) = placed.split()[3:5], kind.split()
        name = {"cgroup2": "", "cgroup": controller}.get(system)
        if name not in mine or (name and name not in options.split(",")):
            continue
        base, path = root / place.lstrip("/"), Path(mine[name])
        below = path.relative_to(top) if path.is_relative_to(top) and ".." not in path.parts else Path()
        yield from (base / each for each in (below, *below.parents))
