"""Measures other programs' load while contenders are idle."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

_IDLE = (3, 4)  # idle, iowait: the fields of /proc/stat's first line after its name


def busy_share(before: Sequence[int], after: Sequence[int]) -> float:
    """Returns the busy share of all processors between two readings."""
    passed = [b - a for a, b in zip(before, after, strict=True)]
    return 1 - sum(passed[i] for i in _IDLE) / sum(passed) if sum(passed) else 0.0


def watch(seconds: float = 1.0) -> float | None:
    """Returns the busy share while this process sleeps; None on systems other than Linux."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    before = _times(stat)
    time.sleep(seconds)
    return busy_share(before, _times(stat))


def _times(stat: Path) -> list[int]:
    return [int(field) for field in stat.read_text().split("\n", 1)[0].split()[1:9]]
