"""A run beside earlier ones of the same configuration."""

from __future__ import annotations

import copy
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tandem.comparison.report.history import INDEX, MOST, append_run, history_table, run_as_json, runs_until, sparkline
from tandem.comparison.report.write import write_report
from tests.comparison.report.example_comparison import example, minimal


@cache
def now() -> dict[str, Any]:
    return run_as_json(example(), Path("now"))


def run(day: int, **changed: Any) -> dict[str, Any]:
    return copy.deepcopy(now()) | {"started_at": f"2026-11-{day:02}T10:00:00+00:00"} | changed


def index(folder: Path, *lines: Any) -> Path:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (folder / INDEX).write_text(text, encoding="utf-8")
    return folder / "now"


def days(runs: list[Any]) -> list[str]:
    return [one["started_at"][8:10] for one in runs]


def test_only_complete_earlier_runs_of_the_same_configuration_count(tmp_path: Path) -> None:
    others = [run(3, machine="another"), run(4, link="loopback"), run(5, partial="Ctrl-C"), run(25)]
    folder = index(tmp_path, run(2), run(1), *others, run(20))
    assert days(runs_until(run(20), folder)) == ["01", "02", "20"]


def test_lines_that_are_no_runs_are_passed_over(tmp_path: Path) -> None:
    odd = [
        "{",
        "[]",
        "null",
        "7",
        "{}",
        run(3, architectures=[]),
        run(4, architectures={"fused": 1}),
        run(5) | {"started_at": 7},
    ]
    assert days(runs_until(run(20), index(tmp_path, *odd, run(6)))) == ["06", "20"]
    assert days(runs_until(run(20), tmp_path / "nowhere" / "now")) == ["20"]


def test_the_newest_runs_are_kept(tmp_path: Path) -> None:
    runs = runs_until(run(20), index(tmp_path, *(run(day) for day in range(1, 20))))
    assert len(runs) == MOST and days(runs)[-2:] == ["19", "20"]


def test_the_table_has_a_row_for_each_run_with_its_sureness_and_a_course(tmp_path: Path) -> None:
    before = run(1, sureness="noise", git_commit="abc")
    before["architectures"]["fused"]["speedup"] = 0.5
    table = history_table([before, run(2, sureness="sure")])
    assert table is not None
    rows = [[cell.text for cell in row] for row in table.rows]
    at = [column.heading for column in table.columns].index("fused")
    assert [row[0] for row in rows] == ["2026-11-02 10:00", "2026-11-01 10:00", "oldest to newest"]
    assert rows[1][at] == "0.50×" and rows[2][at] == "▁█"
    assert [row[-2:] for row in rows[:2]] == [["sure", "–"], ["noise", "abc"]]
    assert history_table([run(2)]) is None


def test_a_report_has_the_section_from_its_second_run_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # plots take seconds
    first, second = minimal(), minimal() | {"started_at": "2026-11-22T11:09:35+00:00"}
    page = write_report(first, tmp_path / "1")[0]
    append_run(first, tmp_path / "1")
    assert "Earlier runs" not in page.read_text(encoding="utf-8")
    page = write_report(second, tmp_path / "2")[0]
    append_run(second, tmp_path / "2")
    text = page.read_text(encoding="utf-8")
    assert "Earlier runs" in text and "2026-11-21 11:09" in text and "2026-11-22 11:09" in text
    assert write_report(second, tmp_path / "2")[0].read_text(encoding="utf-8") == text, "rendered again, it is the same"


@pytest.mark.parametrize(
    ("values", "drawn"), [([1, 2, 3], "▁▅█"), ([2, None, 1], "█ ▁"), ([1, 1], "▅▅"), ([None], "–"), ([], "–")]
)
def test_a_course_is_drawn_from_its_least_to_its_most(values: list[float | None], drawn: str) -> None:
    assert sparkline(values) == drawn
