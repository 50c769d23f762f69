"""Fault schedules by seed, also with kill -9 of processes: a few always, many as a campaign, all that once failed."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tandem.speculation.types import Chunk
from tandem.speculation.verification_mode import Pipeline
from tests.reliability.campaign import Result, run_schedule, run_schedules
from tests.reliability.faults import Fault
from tests.reliability.kills import run_kills
from tests.reliability.processes import Killable
from tests.support import distributed, ids, oracle

REGRESSIONS = json.loads((Path(__file__).parent / "regressions.json").read_text(encoding="utf-8"))
QUIET = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
FEW, MORE, MANY = (0, 5, 8, 10), range(20), 200


def run(seeds: Iterable[int], seconds: float = 120.0, one: Any = run_schedule, at_once: int = 4) -> list[Result]:
    results: list[Result] = asyncio.run(asyncio.wait_for(run_schedules(seeds, one, at_once), seconds))
    failed = [result for result in results if result.violations]
    assert not failed, "\n".join(map(str, failed))
    return results


@QUIET
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


@pytest.mark.parametrize(("kind", "seed"), [(kind, each["seed"]) for kind in REGRESSIONS for each in REGRESSIONS[kind]])
def test_a_schedule_that_once_failed_holds(kind: str, seed: int) -> None:
    run([seed], 270.0, run_kills if kind == "kills" else run_schedule)


def test_a_schedule_ends_with_the_same_tokens_when_it_is_run_again() -> None:
    (once,), (again,) = run([3]), run([3])
    tokens = [[e.message["tokens"] for e in result.history if e.kind == "outcome"] for result in (once, again)]
    assert tokens[0] == tokens[1] != []


@QUIET
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(3), id="a few", marks=pytest.mark.thorough),
        pytest.param(range(100, 124), id="two dozen", marks=pytest.mark.campaign),
    ],
)
def test_schedules_with_kills_hold(seeds: range) -> None:
    assert sum(result.kills for result in run(seeds, 270.0, run_kills, 3)) >= len(seeds)


PROMPT, TOKENS, BEFORE = list(b"a verifier that hangs"), 60, 20
ROLE = ("--role", "target", "--model", "step=0.004", "--sequence_length", "160", "--step_seconds", "1")


async def run_through_a_hang(folder: Path, seconds: float | None) -> tuple[int, ...]:
    """The tokens of a run in whose middle a step hangs for so long, or for good: then the server is started again."""
    server = Killable(folder, "hangs", ROLE)

    async def hang() -> None:
        status, _ = await server.hang(seconds)
        if status is not None:
            await server.start()

    try:
        await server.start()
        rest = {"pipeline": Pipeline.NEVER_WAITING, "reconnect_seconds": 60.0}
        async with distributed(server.address, "salt=0,miss=0.3", **rest) as (generator, _):  # type: ignore[arg-type]
            asked, tokens, hanging = ids(PROMPT, TOKENS, ignore_end_of_sequence=True), list[int](), None
            async with contextlib.aclosing(generator.generate(asked)) as events:
                async for event in events:
                    tokens += event.token_ids if isinstance(event, Chunk) else ()
                    if hanging is None and len(tokens) >= BEFORE:
                        hanging = asyncio.create_task(hang())
            assert hanging is not None
            await hanging
        return tuple(tokens)
    finally:
        server.end()


@QUIET
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(1.4, id="beyond its limit, and returns"),
        pytest.param(None, id="for good", marks=pytest.mark.campaign),
    ],
)
def test_a_run_whose_step_hangs_goes_on_with_the_same_tokens(tmp_path: Path, seconds: float | None) -> None:
    tokens = asyncio.run(run_through_a_hang(tmp_path, seconds))
    assert tokens == oracle(PROMPT, ids(PROMPT).sampling, TOKENS, past_the_end=True)
