"""Schedules with kill -9 of real server processes: a few always, two dozen as a campaign, and every one that failed."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest

from tests.reliability import figures
from tests.reliability.campaign import Result
from tests.reliability.kills import run_many

REGRESSIONS = json.loads((Path(__file__).parent / "regressions.json").read_text(encoding="utf-8"))["kills"]
FEW, MANY = 3, 24
pytestmark = [pytest.mark.timeout(280), pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]


def run(seeds: list[int], folder: Path) -> list[Result]:
    results: list[Result] = asyncio.run(run_many(seeds, folder))
    failed = [result for result in results if result.violations]
    assert not failed, "\n".join(map(str, failed))
    return results


@pytest.mark.thorough
def test_a_few_schedules_with_kills_hold(tmp_path: Path) -> None:
    results = run(list(range(FEW)), tmp_path)
    assert sum(result.kills for result in results) >= FEW


@pytest.mark.campaign
def test_two_dozen_schedules_with_kills_hold(tmp_path: Path) -> None:
    results = run(list(range(100, 100 + MANY)), tmp_path)
    faults = sum((result.faults for result in results), Counter())
    figures.note(
        "kill -9",
        schedules=len(results),
        kills=sum(result.kills for result in results),
        other_faults=faults.total(),
        tokens=sum(result.tokens for result in results),
        wrong_tokens=sum(result.wrong_tokens for result in results),
    )
    assert sum(result.kills for result in results) >= MANY


@pytest.mark.parametrize("case", REGRESSIONS, ids=lambda case: f"seed {case['seed']}")
def test_a_schedule_that_once_failed_holds(case: dict[str, object], tmp_path: Path) -> None:
    run([int(str(case["seed"]))], tmp_path)
