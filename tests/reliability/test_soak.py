"""After a storm of clients that come, leave and are killed, a server holds what it held before."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tandem.rpc.errors import TandemError
from tandem.speculation.verification_mode import Pipeline
from tests.reliability import figures
from tests.reliability.soak import MAX_MORE, NO_OPERATIONS, RESULTS, Say, Soaked, soak
from tests.reliability.soak_client import CLIENTS, within
from tests.reliability.soak_memory import ALLOWED, Memory
from tests.reliability.soak_storm import AFTERWARDS, Disturbances, allowed_ends

SECONDS = float(os.environ.get("TANDEM_SOAK_SECONDS", "3600"))
DONE = ("servers killed", "servers stopped", "client processes stopped", "steps hung", "steps hung for good")
KINDS = {"ask", "leave", "late", "session", "abandon", "cancel_open", "break", "run", "never_wait"}


def soaked(folder: Path, seconds: float, processes: int, between: float, **rest: object) -> Soaked:
    result: Soaked = asyncio.run(soak(folder, seconds, processes, between, **rest))  # type: ignore[arg-type]
    assert not result.wrongs(), result.wrongs()
    assert result.counts["tokens"] > 0
    return result


def note(result: Soaked, processes: int) -> None:
    counts = {name: n for name, n in result.counts.items() if name not in NO_OPERATIONS}
    more = {
        what: max(result.after[server][what] - result.before[server][what] for server in result.before)
        for what in MAX_MORE
    }
    figures.note(
        f"soak of {result.seconds:g} s",
        clients=processes * CLIENTS,
        operations=result.operations,
        by_kind=counts,
        refused=result.counts["refused"],
        lost_to_disturbances=result.counts["disturbed"],
        of_them_to_hung_steps=result.counts["step hung"],
        done=dict(result.done),
        tokens=result.counts["tokens"],
        wrong_outputs=result.counts["wrong"],
        held_more_than_before=more,
        memory_rose_in_the_last_half={name: round(result.memory.rise(name)) for name in result.before},
    )


@pytest.mark.timeout(300)
@pytest.mark.thorough
def test_a_short_storm_leaves_nothing_behind(tmp_path: Path) -> None:
    result = soaked(tmp_path, 4.0, 2, 0.5)
    assert result.done["client processes killed"] >= 1
    assert sum(result.done.values()) > result.done["client processes killed"], "nothing else was done"


@pytest.mark.campaign
@pytest.mark.timeout(400)
def test_a_minute_of_storm_with_32_clients_leaves_nothing_behind(tmp_path: Path) -> None:
    result = soaked(tmp_path, 60.0, 4, 3.0, pipeline=Pipeline.NEVER_WAITING)
    note(result, 4)
    assert result.counts.keys() >= KINDS


@pytest.mark.campaign
@pytest.mark.marathon
@pytest.mark.timeout(SECONDS + 600)
def test_an_hour_of_storm_with_32_clients_leaves_nothing_behind(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """TANDEM_SOAK_SECONDS sets another duration."""

    def say(line: str) -> None:
        with capfd.disabled():
            print(line, flush=True)

    shown: Say = say
    result = soaked(tmp_path, SECONDS, 4, 3.0, results=RESULTS, say=shown)
    note(result, 4)
    assert result.counts.keys() >= KINDS
    assert min(result.done[what] for what in DONE) >= 1 and result.counts["step hung"] >= 1


# --- the soak itself can fail ---


def test_memory_that_rises_with_operations_is_not_flat_and_noise_is() -> None:
    memory = Memory()
    for second in range(200):
        noise = (second * 7919) % 300_000
        memory.samples.setdefault("steady", []).append((second, 100 * 2**20 + noise, 9, 9))
        memory.samples.setdefault("early", []).append((second, (100 + min(second, 90)) * 2**20, 9, 9))
        memory.samples.setdefault("leaking", []).append((second, 100 * 2**20 + 40_000 * second + noise, 9, 9))
    assert memory.not_flat("steady", 10_000) == memory.not_flat("early", 10_000) == ""
    assert "leaking: memory rose by 3." in memory.not_flat("leaking", 10_000)
    assert memory.rise("leaking") > ALLOWED


def test_a_client_that_is_cancelled_as_its_operation_ends_ends() -> None:
    """wait_for of Python 3.10 and 3.11 goes on then."""

    async def operation(client: asyncio.Future[asyncio.Task[None]], fails: bool) -> None:
        (await client).cancel()
        if fails:
            raise TandemError("UNAVAILABLE", "meanwhile")

    async def test() -> None:
        for fails in (False, True):
            itself = asyncio.get_running_loop().create_future()
            client = asyncio.create_task(within(60.0, operation(itself, fails)))
            itself.set_result(client)
            with pytest.raises(asyncio.CancelledError):
                await client
        with pytest.raises(asyncio.TimeoutError):
            await within(0.0, asyncio.sleep(3600))

    asyncio.run(test())


def test_only_a_disturbance_of_its_own_server_excuses_a_failure() -> None:
    told = Disturbances([("mortal", 100.0, 102.0)])
    assert told.excuse("mortal", "UNAVAILABLE", 101.0, 101.5) and told.excuse("mortal", "NOT_FOUND", 99.0, 100.5)
    assert not told.excuse("mortal", "INTERNAL", 101.0, 101.5)
    assert not told.excuse("mortal", "", 101.0, 161.0), "a hang"
    assert not told.excuse("worker", "UNAVAILABLE", 101.0, 101.5), "it goes on at the other verifier"
    assert not told.excuse("target", "UNAVAILABLE", 101.0, 101.5)
    assert not told.excuse("mortal", "UNAVAILABLE", 98.0, 99.0)
    assert not told.excuse("mortal", "UNAVAILABLE", 102.0 + AFTERWARDS + 1, 120.0)


def test_a_server_may_end_only_if_its_step_hung_for_twice_the_bound() -> None:
    assert allowed_ends(None, 4.1) == (1,)
    assert allowed_ends(1.8, 3.9) == (None,)
    assert allowed_ends(1.8, 4.1) == (None, 1), "the storm was late"


def test_what_a_soak_must_not_find_is_said() -> None:
    clean = {what: 0 for what in MAX_MORE}
    result = Soaked(before={"target": clean}, after={"target": clean, "mortal": clean})
    assert result.wrongs() == []
    result.counts["wrong"] = 1
    result.after = {"target": clean | {"tasks": 3}, "mortal": clean | {"slots": 1}}
    result.failures = [{"server": "target", "error": "INTERNAL: x"}]
    result.ends = ["mortal: a step hung for ever, and it ended with 0"]
    said = "\n".join(result.wrongs())
    assert "1 outputs with wrong tokens" in said and "mortal holds 1 slots" in said
    assert "target holds 3 tasks more than before" in said and "INTERNAL: x" in said
    assert "it ended with 0" in said
