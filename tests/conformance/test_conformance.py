"""Every case of the table over every combination: run where it applies, declared with a reason where it does not."""

from __future__ import annotations

import asyncio

import pytest
from google.rpc.code_pb2 import Code

from tandem.services.http.refusals import REASONS
from tandem.services.statuses import _TABLE
from tests.conformance.bench import COMBINATIONS, Combination
from tests.conformance.cases import CASES, Entry
from tests.conformance.deployments import deployed
from tests.support import REPOSITORY

THERE = {entry.name: [c for c in COMBINATIONS if c.runner == "toy" and not entry.left_out(c)] for entry in CASES}
# Of each case a combination runs daily, by turns; the others with `make thorough`.
TOY = [
    pytest.param(
        entry,
        combination,
        id=f"{entry.name}-{combination}",
        marks=() if place == number % len(THERE[entry.name]) else pytest.mark.thorough,
    )
    for number, entry in enumerate(CASES)
    for place, combination in enumerate(THERE[entry.name])
]
# One of them with `make thorough`, the others with `make reliability`.
THOROUGH = ("distributed", "stream")
REAL = [
    pytest.param(
        c, id=str(c), marks=pytest.mark.thorough if (c.architecture, c.transport) == THOROUGH else pytest.mark.campaign
    )
    for c in COMBINATIONS
    if c.runner == "torch" and not all(entry.left_out(c) for entry in CASES)
]


async def run_case(entry: Entry, combination: Combination) -> None:
    async with deployed(combination, entry.lease_seconds) as bench:
        await entry.case(bench)
        if bench.inside:
            await bench.inside.all_free()


@pytest.mark.parametrize(("entry", "combination"), TOY)
def test_the_case_holds_on_the_toy_runner(entry: Entry, combination: Combination) -> None:
    asyncio.run(asyncio.wait_for(run_case(entry, combination), 60))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("combination", REAL)
def test_the_cases_of_the_real_pair_hold(combination: Combination) -> None:
    """One set of servers for all of them: the models are what takes long."""

    async def test() -> list[str]:
        failed = []
        async with deployed(combination) as bench:
            for entry in CASES:
                if not entry.left_out(combination):
                    try:
                        await entry.case(bench)
                    except AssertionError as error:
                        failed.append(f"{entry.name}: {error}")
        return failed

    assert asyncio.run(asyncio.wait_for(test(), 280)) == []


def test_every_guarantee_has_a_case() -> None:
    proved = {guarantee for entry in CASES for guarantee in entry.guarantees}
    assert proved == {f"G{n}" for n in range(1, 12)}, "G12 is proved with processes: tests/services/test_stopping.py"


def test_the_page_lists_every_status_that_a_server_gives() -> None:
    page = (REPOSITORY / "docs" / "sessions.md").read_text(encoding="utf-8")
    http = [(None, code, reason) for reason, (code, *_) in REASONS.items()]
    for _, code, reason in (*_TABLE, *http):
        rows = [line for line in page.splitlines() if line.startswith(f"| {Code.Name(code)} |")]
        assert any(reason in row.split("|")[2].replace(",", " ").split() for row in rows), f"{Code.Name(code)} {reason}"
