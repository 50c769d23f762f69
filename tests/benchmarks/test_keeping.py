"""Whatever ends a benchmark, its file has what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.keeping import kept


def written(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_what_was_measured_is_written_after_a_whole_run_and_after_one_that_ends_early(tmp_path: Path) -> None:
    path = tmp_path / "new" / "found.json"
    samples: list[float] = []
    with kept(path, lambda: {"mean": sum(samples) / len(samples)}, lambda: {"samples": samples}):
        samples.append(2.0)
    assert written(path) == {"mean": 2.0, "partial": None}
    with pytest.raises(KeyboardInterrupt), kept(path, lambda: {"of": len(samples)}, lambda: {"samples": samples}):
        samples.append(3.0)
        raise KeyboardInterrupt
    assert written(path)["of"] == 2
    assert written(path)["partial"].startswith("KeyboardInterrupt:  (test_keeping.py:")


def test_figures_that_cannot_be_made_leave_the_measurements(tmp_path: Path) -> None:
    with kept(tmp_path / "found.json", lambda: {"rate": 1 / 0}, lambda: {"samples": [1.5]}):
        pass
    found = written(tmp_path / "found.json")
    assert found["samples"] == [1.5]
    assert "ZeroDivisionError: division by zero" in found["remark"]
