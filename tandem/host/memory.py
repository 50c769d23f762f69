"""Memory available to a process."""

from __future__ import annotations

import sys
from pathlib import Path

from tandem.host.cgroups import free_memory


def free_bytes(root: Path = Path("/")) -> int | None:
    """Bytes left by the system or the container's limit; None if unknown (not Linux)."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None
    limited = free_memory(root)
    return max(0, free if limited is None else min(free, limited))


def given_on_demand() -> bool:
    """Whether released pages read as zeros: on Linux they do."""
    return sys.platform == "linux"
