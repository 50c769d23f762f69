"""The sentence about what a head's features paid for."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.comparison.report.statements import notes


def figures(rate: float, length: float, down: float | None, drafted: int = 9) -> dict[str, Any]:
    return {
        "acceptance_rate": rate,
        "mean_acceptance_length": length,
        "bytes_down_per_token": down,
        "drafted": drafted,
    }


def test_acceptance_gained_stands_against_bytes_paid() -> None:
    found = {"distributed": figures(0.5, 2.0, 20.0), "distributed_head": figures(0.7, 2.5, 3520.0)}
    assert notes(found) == [
        "head against draft model: accepted 0.700 against 0.500, 2.50 against 2.00 tokens a round (+0.50), for 3,520"
        " bytes a token down instead of 20: 7,000 bytes a token for each token more in a round."
    ]
    found["distributed"] = figures(0.8, 3.0, 20.0)
    (line,) = notes(found)
    assert line.endswith("(-0.50), for 3,520 bytes a token down instead of 20.")


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"distributed": figures(0.5, 2.0, 20.0)},
        {"distributed": figures(0.5, 2.0, 20.0, drafted=0), "distributed_head": figures(0.7, 2.5, 3520.0)},
        {"distributed": figures(0.5, 2.0, None), "distributed_head": figures(0.7, 2.5, 3520.0)},
    ],
)
def test_without_both_sides_nothing_is_said(found: dict[str, Any]) -> None:
    assert notes(found) == []
