"""Seeded fault schedules on the toy runner: a few always, 200 as a campaign, and every one that ever failed."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.reliability.campaign import Result, run_schedules
from tests.reliability.faults import Fault

REGRESSIONS = json.loads((Path(__file__).parent / "regressions.json").read_text(encoding="utf-8"))
FEW, MORE, MANY = (0, 5, 8, 10), range(20), 200


def run(seeds: list[int], seconds: float = 120.0) -> list[Result]:
    results: list[Result] = asyncio.run(asyncio.wait_for(run_schedules(seeds), seconds))
    failed = [result for result in results if result.violations]
    assert not failed, "\n".join(map(str, failed))
    return results


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("seeds", [FEW, pytest.param(MORE, marks=pytest.mark.thorough)])
def test_a_few_schedules_hold(seeds: Sequence[int]) -> None:
    results = run([*seeds])
    faults = sum((result.faults for result in results), Counter())
    assert faults.total() > 3 * len(seeds)
    assert {fault for result in results for fault in result.faults} >= {"abort after", "expire lease", "duplicate"}


@pytest.mark.campaign
@pytest.mark.timeout(300)
def test_two_hundred_schedules_hold_and_meet_every_kind_of_fault() -> None:
    results = run(list(range(1000, 1000 + MANY)), 280)
    faults = sum((result.faults for result in results), Counter())
    assert faults.keys() == {fault.value for fault in Fault}


@pytest.mark.parametrize("case", REGRESSIONS["schedules"], ids=lambda case: f"seed {case['seed']}")
def test_a_schedule_that_once_failed_holds(case: dict[str, object]) -> None:
    run([int(str(case["seed"]))])


def test_a_schedule_ends_with_the_same_tokens_when_it_is_run_again() -> None:
    (once,), (again,) = run([3]), run([3])
    tokens = [[e.message["tokens"] for e in result.history if e.kind == "outcome"] for result in (once, again)]
    assert tokens[0] == tokens[1] != []
