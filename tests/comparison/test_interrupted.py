"""The real command with real servers of the toy backend, ended in the middle."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.cli.compare import main
from tandem.comparison.measuring.record_log import NAME, read_records
from tests.support import REPOSITORY

PATIENCE = 120.0
COMMAND = [sys.executable, str(REPOSITORY / "compare_architectures.py"), "--backend", "toy", "--model", "step=0.01"]
COMMAND += ["--draft", "model", "--draft-model", "miss=0.3,step=0.001", "--architectures", "autoregressive,fused"]
COMMAND += ["--prompt", "one", "--prompt", "two", "--prompt", "three", "--num-runs", "1000"]
COMMAND += ["--max-new-tokens", "8"]


# Daily without processes: test_driver.py.
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(300),
]  # more than twice PATIENCE: it is the test that says what hung


def until(seen: Callable[[], bool], of: subprocess.Popen[str]) -> None:
    ends = time.monotonic() + PATIENCE
    while not seen():
        assert of.poll() is None, "it ended by itself"
        assert time.monotonic() < ends, "it never got there"
        time.sleep(0.02)


def requests_of(folder: Path) -> int:
    path = folder / NAME
    return path.read_text().count('"kind": "record"') if path.exists() else 0


def server_pids(folder: Path) -> list[int]:
    return [json.loads(path.read_text())["pid"] for path in (folder / "logs").glob("*.ready.json")]


def is_running(pid: int) -> bool:
    """A process that has ended and waits to be reaped, by whoever inherited it, is not running."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def measuring(folder: Path) -> subprocess.Popen[str]:
    """The command, once it has measured a few requests."""
    command = [*COMMAND, "--output-dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until(lambda: requests_of(folder) >= 4, process)
    return process


def ended(process: subprocess.Popen[str], folder: Path) -> tuple[str, str]:
    """What it wrote on stdout and stderr. No server is left."""
    out, err = process.communicate(timeout=PATIENCE)
    pids = server_pids(folder)
    assert pids
    ends = time.monotonic() + PATIENCE
    while any(map(is_running, pids)):  # what was killed may take a moment to be gone
        assert time.monotonic() < ends, "a server is left"
        time.sleep(0.02)
    return out, err


def comparison_in(folder: Path) -> dict[str, Any]:
    """Every file is there; the one that has all is returned."""
    for name in ("report.html", "comparison.csv"):
        assert (folder / name).stat().st_size > 0
    found: dict[str, Any] = json.loads((folder / "comparison.json").read_text())
    assert len(found["records"]) == requests_of(folder)
    assert found["planned"] == 6000
    assert found["verdicts"][0]["sentence"]
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_partial_report_and_its_exit_code(number: signal.Signals, tmp_path: Path) -> None:
    process = measuring(tmp_path)
    process.send_signal(number)
    out, err = ended(process, tmp_path)
    assert process.returncode == 128 + number, err
    found = comparison_in(tmp_path)
    assert found["missing"] == f"interrupted by {number.name}"
    assert f"PARTIAL: interrupted by {number.name}; {len(found['records'])} of 6000 requests were measured" in out
    assert f"This run is partial: interrupted by {number.name}" in (tmp_path / "report.html").read_text()
    assert "Traceback" not in err


def test_a_second_signal_ends_at_once_and_the_records_are_enough_for_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = measuring(tmp_path)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    line = ""
    while "interrupt again to exit at once" not in line:
        line = process.stderr.readline()
        assert line, "it ended without a word"
    process.send_signal(signal.SIGINT)
    ended(process, tmp_path)
    assert process.returncode == 130

    path = tmp_path / NAME  # as a run that is killed in the middle of a line leaves it
    lines = [line for line in path.read_text().splitlines(keepends=True) if '"kind": "end"' not in line]
    measured = requests_of(tmp_path)
    path.write_text("".join(lines) + lines[-1][:40])
    assert not read_records(path).ended
    again = tmp_path / "again"
    code = main(["--from-records", str(path), "--output-dir", str(again)])
    assert code == 0
    found = json.loads((again / "comparison.json").read_text())
    assert len(found["records"]) == measured
    assert found["missing"] == "the run has not ended, or was killed"
    assert "PARTIAL: " in capsys.readouterr().out
