"""The benchmark of capacity: the device that it rehearses, what it reads, and a short run of real servers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import capacity
from benchmarks.capacity import Knee, knee_of, main, times_of
from tandem.comparison.analysis.loads import Capacity, Served
from tests.comparison.test_verdict import PAIR, comparison, run

SERVED = (Served("fused", 4.0, False, 9.0, ()), Served("distributed", 6.4, False, 9.0, ()))


def test_the_rehearsed_device_serves_rows_one_after_the_other() -> None:
    times = times_of(0.2, 100.0)
    assert times.target and times.draft
    for rows in (1, 2, 3, 5, 8, 16):
        assert times.target.steps.seconds(1 + capacity.DRAFTED, rows) == pytest.approx(0.1 * rows)
        assert times.draft.steps.seconds(2, rows) == pytest.approx(0.02 * rows)


def test_a_knee_is_held_against_the_law() -> None:
    found = comparison(run(PAIR, prompts=1))
    knee = knee_of(0.2, replace(found, capacity=Capacity(0.1, SERVED, 1.6, 1.5)))
    assert knee == Knee(0.2, 4.0, 6.4, 1.6, 1.5, 0.0) and knee.off == pytest.approx(1 / 15)
    assert str(knee) == "| 0.2 | 4.0 | 6.4 | 1.60 | 1.50 | +7 % | 0 % |"
    with pytest.raises(ValueError, match="no knee of both"):
        knee_of(0.2, replace(found, capacity=Capacity(0.1, SERVED, None, 1.5)))


@pytest.mark.thorough
def test_a_ratio_is_measured_once_and_judged_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--ratios", "1", "--step-ms", "20", "--clients", "1,2,3", "--max-new-tokens", "8", "--output"]
    first = main([*arguments, str(tmp_path)])
    written = (tmp_path / "1" / "comparison.json").stat().st_mtime
    assert main([*arguments, str(tmp_path)]) == first
    assert (tmp_path / "1" / "comparison.json").stat().st_mtime == written
    said = capsys.readouterr()
    assert first in (0, 1) and ("within 10% of the law" in said.out or "no knee" in said.err)
