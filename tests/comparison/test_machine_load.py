"""What other programs do to this machine is seen around a request, and what our own servers do is not counted."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tandem.comparison.measuring import machine
from tandem.comparison.measuring.machine import LoadWatch, MachineLoad

FIRST = "cpu  100 0 50 800 10 0 5 35 0 0\ncpu0 1 1\nprocs_running {running}\n"
LATER = "cpu  160 0 70 880 10 0 5 75 0 0\ncpu0 1 1\nprocs_running {running}\n"


def process(folder: Path, pid: int, ticks: int, children: str = "") -> None:
    (folder / f"{pid}" / "task" / f"{pid}").mkdir(parents=True, exist_ok=True)
    (folder / f"{pid}" / "stat").write_text(f"{pid} (a (name) R 9) S 1 1 1 0 -1 0 0 0 0 0 {ticks} 0 0 0 20 0 1")
    (folder / f"{pid}" / "task" / f"{pid}" / "children").write_text(children)


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "PROC", tmp_path)
    monkeypatch.setattr(machine.os, "getpid", lambda: 7)
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (17.0, 9.0, 3.0))
    return tmp_path


def watched(proc: Path, all_ours: bool = True, alone: bool = True) -> MachineLoad:
    """Between the two moments 200 ticks pass: 80 idle, 40 stolen, 80 busy, of which this process's child has 50."""
    (proc / "stat").write_text(FIRST.format(running=6))
    process(proc, 7, 0, "8 9 ")
    process(proc, 8, 10)
    watch = asyncio.run(LoadWatch.started(alone))
    (proc / "stat").write_text(LATER.format(running=2))
    process(proc, 8, 60)
    return watch.ended(all_ours)


def test_what_is_not_our_own_is_that_of_others_and_what_is_not_known_is_none(proc: Path) -> None:
    assert asyncio.run(LoadWatch.started()).ended() == MachineLoad(17.0), "a system without these files"
    assert watched(proc) == MachineLoad(17.0, waiting=5, others=0.15, steal=0.2)
    assert watched(proc, all_ours=False) == MachineLoad(17.0, waiting=5, others=None, steal=0.2)


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="no /proc here")
def test_the_time_of_a_child_is_counted_as_our_own_also_once_it_has_ended() -> None:
    code = "import time\nend = time.process_time() + 0.4\nwhile time.process_time() < end: pass"

    def seen(*command: str) -> int:
        before = asyncio.run(LoadWatch.started(alone=False)).own
        subprocess.run(command, check=True)
        time.sleep(0.02)
        return asyncio.run(LoadWatch.started(alone=False)).own - before

    assert seen(sys.executable, "-c", code) >= 35
    assert seen("sh", "-c", "sleep 0.1") < 20
