"""What the benchmark of features says of its pairs."""

from __future__ import annotations

from benchmarks.features import Outcome, parse, report


def test_the_report_gives_each_format_its_ratio_and_its_bytes() -> None:
    outcome = Outcome(
        {"none": [(0.010, 0.011), (0.010, 0.012), (0.010, 0.010)], "int8": [(0.010, 0.02)]}, {"int8": 1740}, 4, 4
    )
    none, int8, same = report(outcome)
    assert none.startswith("none ") and "ratio 1.100" in none
    assert "ratio 2.000; 1740 bytes a position" in int8
    assert same == "same tokens with and without: 4/4"
    assert parse(["--rounds", "3"]).rounds == 3
