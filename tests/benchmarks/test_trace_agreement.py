"""The benchmark of recorded links: a short run, and files that are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.trace_agreement import main, offline


def test_a_message_has_left_with_its_last_segment() -> None:
    assert offline((10, 20, 30), [(0.0, 64), (0.001, 2900), (0.012, 64)]) == [0.010, 0.030, 0.030]


def test_it_compares_a_replay_with_the_queue_computed_offline(tmp_path: Path) -> None:
    trace, output = tmp_path / "steady", tmp_path / "found.json"
    trace.write_text("".join(f"{at}\n" for at in range(1, 1001)))
    assert main([str(trace), "--seconds", "1", "--output", str(output)]) == 0
    (found,) = json.loads(output.read_text())["agreements"]
    assert found["trace"] == "steady" and found["messages"] > 5
    assert found["mean_s"] > 0.02 < found["expected_mean_s"]


def test_a_file_that_is_no_trace_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "nothing")])
    assert ended.value.code == 2
    assert "No such file" in capsys.readouterr().err
