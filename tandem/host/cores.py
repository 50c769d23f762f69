"""Core lists such as `0-3,8`, and threads per process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tandem.host.cgroups import cpu_quota

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
