"""Schedules with kill -9 of real server processes: a few always, two dozen as a campaign, and every one that failed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.reliability.campaign import Result
from tests.reliability.kills import run_many

REGRESSIONS = json.loads((Path(__file__).parent / "regressions.json").read_text(encoding="utf-8"))["kills"]
pytestmark = [pytest.mark.timeout(280), pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]


def run(seeds: list[int], folder: Path) -> list[Result]:
    results: list[Result] = asyncio.run(run_many(seeds, folder))
    failed = [result for result in results if result.violations]
    assert not failed, "\n".join(map(str, failed))
    return results


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(3), id="a few", marks=pytest.mark.thorough),
        pytest.param(range(100, 124), id="two dozen", marks=pytest.mark.campaign),
    ],
)
def test_schedules_with_kills_hold(seeds: range, tmp_path: Path) -> None:
    assert sum(result.kills for result in run(list(seeds), tmp_path)) >= len(seeds)


@pytest.mark.parametrize("case", REGRESSIONS, ids=lambda case: f"seed {case['seed']}")
def test_a_schedule_that_once_failed_holds(case: dict[str, object], tmp_path: Path) -> None:
    run([int(str(case["seed"]))], tmp_path)
