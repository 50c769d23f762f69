"""After a storm of clients that come, leave and are killed, a server holds what it held before."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest

from tandem.speculation.verification_mode import Pipeline
from tests.reliability.soak import AFTERWARDS, MAX_MORE, Memory, Soaked, Storm, allowed_ends, soak

SECONDS = float(os.environ.get("TANDEM_SOAK_SECONDS", "60"))  # `make soak` sets an hour
KINDS = {"ask", "leave", "late", "session", "abandon", "cancel_open", "never_wait", "hostile"}


@pytest.mark.timeout(300)
@pytest.mark.thorough
def test_a_short_storm_leaves_nothing_behind(tmp_path: Path) -> None:
    result = asyncio.run(soak(tmp_path, 4.0, 2, 0.5))
    assert result.wrongs() == [] and result.counts["tokens"] > 0
    assert sum(result.done.values()) > result.done["client processes killed"] >= 1


@pytest.mark.campaign
@pytest.mark.timeout(SECONDS + 400)
def test_a_minute_of_storm_with_32_clients_leaves_nothing_behind(tmp_path: Path) -> None:
    result = asyncio.run(soak(tmp_path, SECONDS, 4, 3.0, pipeline=Pipeline.NEVER_WAITING))
    print(dict(result.counts), dict(result.done))
    assert result.wrongs() == [] and result.counts["tokens"] > 0
    assert result.counts.keys() >= KINDS


def test_memory_that_rises_with_operations_is_not_flat_and_noise_is() -> None:
    memory = Memory()
    for second in range(200):
        noise = (second * 7919) % 300_000
        memory.samples.setdefault("early", []).append((second, (100 + min(second, 90)) * 2**20 + noise))
        memory.samples.setdefault("leaking", []).append((second, 100 * 2**20 + 40_000 * second + noise))
    assert memory.not_flat("early", 10_000) == []
    assert "leaking: memory rose by 3." in memory.not_flat("leaking", 10_000)[0]


def test_only_a_disturbance_of_its_own_server_excuses_a_failure(tmp_path: Path) -> None:
    storm = Storm(tmp_path, {}, random.Random(0))
    storm.spans.append(("mortal", 100.0, 102.0))

    def excused(server: str, code: str, began: float, ended: float) -> bool:
        return storm.excuses({"server": server, "code": code, "began": began, "ended": ended})

    assert excused("mortal", "UNAVAILABLE", 101.0, 101.5) and excused("mortal", "NOT_FOUND", 99.0, 100.5)
    assert not excused("mortal", "INTERNAL", 101.0, 101.5)
    assert not excused("mortal", "", 101.0, 161.0), "a hang"
    assert not excused("worker", "UNAVAILABLE", 101.0, 101.5), "it goes on at the other verifier"
    assert not excused("mortal", "UNAVAILABLE", 98.0, 99.0)
    assert not excused("mortal", "UNAVAILABLE", 102.0 + AFTERWARDS + 1, 120.0)


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
    found = "\n".join(result.wrongs())
    assert "1 outputs with wrong tokens" in found and "mortal holds 1 slots" in found
    assert "target holds 3 tasks more than before" in found and "INTERNAL: x" in found
    assert "it ended with 0" in found
