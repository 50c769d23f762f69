"""Each mechanism that a promise rests on, taken away: the conformance suite and the schedules must notice."""

from __future__ import annotations

import asyncio
import functools
import time

import pytest

from tests.conformance.bench import COMBINATIONS
from tests.conformance.cases import CASES, Entry
from tests.conformance.deployments import deployed
from tests.planting import PlaceGone, function_at
from tests.reliability.campaign import run_schedules
from tests.reliability.mutants import FENCE, FIRST_TOKEN_COUNTS, MUTANTS, OWNERSHIP, Mutant, planted
from tests.support import HANG

BY_NAME = {entry.name: entry for entry in CASES}
AT_ONCE, MOST_SEEDS = 8, 48
"""Schedules that run together, and those that are searched for a mutant at most, the later ones with more time. They
overlap in real time, so which of them meets a mutant depends on the machine; the campaign runs hundreds."""


async def holds(entry: Entry, seconds: float) -> bool:
    """Whether a case passes on one combination of each architecture that it runs on; one that hangs does not."""
    for architecture in entry.architectures:
        combination = next(c for c in COMBINATIONS if c.architecture == architecture and not entry.left_out(c))
        try:
            async with deployed(combination, entry.lease_seconds) as bench:
                await asyncio.wait_for(entry.case(bench), seconds)
        except Exception:
            return False
    return True


@functools.cache
def seconds_of(case: str) -> float:
    """What a case takes on this machine now, without a mutant; it must hold."""
    began = time.monotonic()
    assert asyncio.run(holds(BY_NAME[case], HANG)), f"{case} does not hold without a mutant"
    return time.monotonic() - began


@functools.cache
def seconds_of_schedules() -> float:
    """Likewise of the schedules: the client that takes longest."""
    began = time.monotonic()
    results = asyncio.run(run_schedules(list(range(AT_ONCE)), at_once=AT_ONCE))
    assert not any(result.violations for result in results)
    return time.monotonic() - began


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("mutant", "case"), [pytest.param(m, c, id=f"{m.name}: {c}") for m in MUTANTS for c in m.cases]
)
def test_the_case_fails_without_it(mutant: Mutant, case: str) -> None:
    """One that makes a case hang is caught by the clock: after ten times what it takes otherwise."""
    limit = max(2.0, 10 * seconds_of(case))
    with planted(mutant):
        assert not asyncio.run(holds(BY_NAME[case], limit)), f"{case} does not notice that {mutant.name}"


@pytest.mark.thorough
@pytest.mark.parametrize("case", sorted({case for mutant in MUTANTS for case in mutant.cases}))
def test_the_case_holds_with_it(case: str) -> None:
    assert seconds_of(case) > 0


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.schedules], ids=lambda m: m.name)
def test_fault_schedules_find_it(mutant: Mutant) -> None:
    seconds = seconds_of_schedules()

    async def found(seconds: float) -> set[str]:
        rules: set[str] = set()
        for first in range(0, MOST_SEEDS, AT_ONCE):
            results = await run_schedules(list(range(first, first + AT_ONCE)), at_once=AT_ONCE, seconds=seconds)
            rules |= {violation.rule for result in results for violation in result.violations}
            if rules & set(mutant.schedules):
                break
            seconds *= 2
        return rules

    with planted(mutant):
        rules = asyncio.run(found(max(2.5, 2 * seconds)))
    assert rules & set(mutant.schedules), f"found {rules or 'nothing'} where {mutant.name}"


def test_the_list_has_what_the_contract_rests_on() -> None:
    names = {mutant.name for mutant in MUTANTS}
    assert {"the fence is gone", "the reply is not recorded", "a cancelled open keeps its slot"} <= names
    assert "sessions belong to nobody" in names
    assert len(names) == len(MUTANTS)
    elsewhere = (OWNERSHIP, FIRST_TOKEN_COUNTS)  # tests/reliability/test_ownership.py
    assert all(mutant.cases or mutant.schedules or mutant in elsewhere for mutant in MUTANTS)


def test_a_mutant_whose_place_is_gone_says_so_and_the_original_comes_back() -> None:
    code = function_at(FENCE).__code__
    with pytest.raises(PlaceGone, match="adapt the mutant"), planted(Mutant("x", FENCE, "no such text", "", ())):
        pass
    with planted(next(mutant for mutant in MUTANTS if mutant.where == FENCE)):
        assert function_at(FENCE).__code__ is not code
    assert function_at(FENCE).__code__ is code
