"""The benchmark of prefixes: what it makes of the times that it measured."""

from __future__ import annotations

import pytest

from benchmarks.prefixes import Outcome, parse, ratio, report


def test_a_ratio_is_the_median_of_pairs_with_over_without() -> None:
    assert ratio([(1.0, 0.1), (2.0, 0.4), (10.0, 9.0)]) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("kind", "without", "with_them", "verdict"),
    [
        ("shared", 1.0, 0.15, "ratio 0.150 (within the bar of 0.15)"),
        ("shared", 1.0, 0.16, "ratio 0.160 (ABOVE the bar of 0.15)"),
        ("unshared", 1.0, 1.01, "ratio 1.010 (within the bar of 1.01)"),
        ("unshared", 1.0, 1.02, "ratio 1.020 (ABOVE the bar of 1.01)"),
    ],
)
def test_the_report_holds_the_time_to_first_token_against_its_bar(
    kind: str, without: float, with_them: float, verdict: str
) -> None:
    outcome = Outcome(same=2, asked=3)
    outcome.first[kind].append((without, with_them))
    line, last = report(outcome)
    assert line.startswith(kind) and verdict in line
    assert last == "same tokens with and without: 2/3"


def test_counts_below_one_are_refused() -> None:
    with pytest.raises(SystemExit):
        parse(["--runs", "0"])
