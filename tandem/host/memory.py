"""Says how much memory a process may still take."""

from __future__ import annotations

import sys
from pathlib import Path

_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def free_bytes() -> int | None:
    """Returns the bytes that the system, or the container's limit, leaves; None where it does not say (not Linux)."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None
    for limit, used in _GROUPS:
        try:
            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # no such version, or "max"
            continue
    return max(0, free)


def given_on_demand() -> bool:
    """Returns whether the system takes pages back such that they read as zeros: Linux does."""
    return sys.platform == "linux"
