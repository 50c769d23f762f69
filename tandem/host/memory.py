"""Says how much memory a process may still take."""

from __future__ import annotations

import sys
from pathlib import Path

from tandem.host.cgroups import free_memory


def free_bytes(root: Path = Path("/")) -> int | None:
    """Returns the bytes that the system, or the container's limit, leaves; None where it does not say (not Linux)."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None
    limited = free_memory(root)
    return max(0, free if limited is None else min(free, limited))


def given_on_demand() -> bool:
    """Returns whether the system takes pages back such that they read as zeros: Linux does."""
    return sys.platform == "linux"
