"""The processes of a server in which structures are compiled and followed."""

from __future__ import annotations

import os
from pathlib import Path

from tandem.engine import structure_worker


def workers(pid: int) -> dict[int, int]:
    """Ids of the living ones that descend from process `pid`, each with that of its parent."""
    parents = {int(path.name): parent for path in Path("/proc").glob("[0-9]*") if (parent := _parent(path)) is not None}
    found: dict[int, int] = {}
    for each in sorted(parents):
        above = [each]
        while (up := parents.get(above[-1], 0)) > 1:
            above.append(up)
        if pid in above[1:] and _is_worker(each):
            found[each] = parents[each]
    return found


def alive(pid: int) -> bool:
    return _parent(Path("/proc", str(pid))) is not None


def reaped(pid: int) -> bool:
    """Whether a process has ended and its parent knows."""
    return not Path(f"/proc/{pid}").exists()


def resident(pid: int) -> int:
    """Bytes that a process has in memory; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _parent(process: Path) -> int | None:
    """The id of a process's parent; None if it has ended."""
    try:
        state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return None if state == "Z" else int(parent)


def _is_worker(pid: int) -> bool:
    try:
        return os.fsencode(structure_worker.__file__) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
