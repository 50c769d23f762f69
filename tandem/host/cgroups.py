"""Memory, and limits of this process's control groups, version 1 or 2."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path


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
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None
    names = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    found = [free]
    for folder in _groups("memory", root):
        for limit, used in names:
            with contextlib.suppress(OSError, ValueError):  # not of this version, or "max"
                found.append(int((folder / limit).read_text()) - int((folder / used).read_text()))
    return max(0, min(found))


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
