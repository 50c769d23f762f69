"""The real command with real servers of the toy backend, interrupted twice."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tandem.cli.compare import main
from tandem.comparison.measuring.record_log import NAME, read_records
from tests.structure_workers import alive
from tests.support import REPOSITORY

PATIENCE = 120.0
COMMAND = [sys.executable, str(REPOSITORY / "compare_architectures.py"), "--backend", "toy", "--model", "step=0.01"]
COMMAND += ["--draft", "model", "--draft-model", "miss=0.3,step=0.001", "--architectures", "autoregressive,fused"]
COMMAND += ["--prompt", "one", "--prompt", "two", "--num-runs", "1000", "--max-new-tokens", "8"]


def requests_of(folder: Path) -> int:
    path = folder / NAME
    return path.read_text().count('"kind": "record"') if path.exists() else 0


@pytest.mark.thorough  # daily without processes: test_driver.py
@pytest.mark.timeout(300)  # more than twice PATIENCE: the test says what hung
def test_a_second_signal_ends_at_once_and_the_records_are_enough_for_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*COMMAND, "--output-dir", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    give_up = time.monotonic() + PATIENCE
    while requests_of(tmp_path) < 4:
        assert process.poll() is None and time.monotonic() < give_up
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    line = ""
    while "interrupt again to exit at once" not in line:
        line = process.stderr.readline()
        assert line, "it ended without a word"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    pids = [json.loads(path.read_text())["pid"] for path in (tmp_path / "logs").glob("*.ready.json")]
    while any(map(alive, pids)):  # what was killed may take a moment to be gone
        assert time.monotonic() < give_up + PATIENCE, "a server is left"
        time.sleep(0.02)

    path = tmp_path / NAME  # as a run that is killed in the middle of a line leaves it
    lines = [line for line in path.read_text().splitlines(keepends=True) if '"kind": "end"' not in line]
    measured = requests_of(tmp_path)
    path.write_text("".join(lines) + lines[-1][:40])
    assert not read_records(path).ended
    assert main(["--from-records", str(path), "--output-dir", str(tmp_path / "again")]) == 0
    found = json.loads((tmp_path / "again" / "comparison.json").read_text())
    assert len(found["records"]) == measured
    assert (found["missing"], found["planned"]) == ("the run has not ended, or was killed", 4000)
    assert "PARTIAL: " in capsys.readouterr().out
