"""Schedules with kill -9 of real server processes: a few always, two dozen as a campaign, and every one that failed."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from tandem.speculation.types import Chunk
from tandem.speculation.verification_mode import Pipeline
from tests.reliability.campaign import Result, run_schedules
from tests.reliability.kills import run_kills
from tests.reliability.processes import Killable
from tests.support import distributed, ids, oracle

REGRESSIONS = json.loads((Path(__file__).parent / "regressions.json").read_text(encoding="utf-8"))["kills"]
pytestmark = [pytest.mark.timeout(280), pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]


def run(seeds: Iterable[int]) -> list[Result]:
    results: list[Result] = asyncio.run(run_schedules(seeds, run_kills, 3))
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
def test_schedules_with_kills_hold(seeds: range) -> None:
    assert sum(result.kills for result in run(seeds)) >= len(seeds)


@pytest.mark.parametrize("case", REGRESSIONS, ids=lambda case: f"seed {case['seed']}")
def test_a_schedule_that_once_failed_holds(case: dict[str, object]) -> None:
    run([int(str(case["seed"]))])


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
