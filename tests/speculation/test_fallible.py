"""A drafter that may fail: rounds go undrafted, trials run beside them, each change is said once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from tandem.speculation.fallible import DrafterHealth, DrafterRefused, FallibleDrafter
from tandem.speculation.retry import Backoff
from tandem.speculation.types import Draft, LengthPlan
from tests.support import HANG

PROMPT, THREE = [1, 2, 3], LengthPlan(3, 3)


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Scripted:
    """Proposes (7,), or raises what `error` says; waits for `gate` first."""

    error: Exception | None = None
    gate: asyncio.Event | None = None
    calls: list[str] = field(default_factory=list)

    async def open(self, prompt: Sequence[int]) -> None:
        await self._do(f"open {len(prompt)}")

    async def propose(self, tokens: Sequence[int], plan: LengthPlan) -> Draft:
        await self._do(f"propose {len(tokens)}")
        return Draft((7,))

    async def close(self) -> None:
        self.calls.append("close")

    async def _do(self, call: str) -> None:
        self.calls.append(call)
        if self.gate:
            await self.gate.wait()
        if self.error:
            raise self.error


def health(clock: Clock) -> DrafterHealth:
    return DrafterHealth("x", Backoff(clock, 1.0, 30.0))


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


# --- when to try again ---


def test_trials_come_after_one_second_then_twice_as_long_up_to_thirty() -> None:
    clock = Clock()
    backoff = Backoff(clock, 1.0, 30.0)
    assert backoff.up and not backoff.due()
    assert backoff.failed()
    for wait in (1, 2, 4, 8, 16, 30, 30):
        clock.now += wait - 0.01
        assert not backoff.due()
        clock.now += 0.01
        assert backoff.due()
        assert not backoff.due()  # somebody makes it already
        assert not backoff.failed()
    clock.now += 30
    assert backoff.due()
    assert backoff.succeeded() is not None and backoff.up
    assert backoff.succeeded() is None


def test_a_trial_that_never_ends_leaves_the_next_one_to_others() -> None:
    clock = Clock()
    backoff = Backoff(clock, 1.0, 30.0)
    backoff.failed()
    clock.now += 1
    assert backoff.due()
    clock.now += 1
    assert backoff.due()


# --- a request ---


async def test_a_failure_costs_one_call_and_the_following_rounds_ask_nobody(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    state = health(Clock())
    inner = Scripted(RuntimeError("it\nbroke"))
    drafter = FallibleDrafter(inner, state)
    await drafter.open(PROMPT)
    assert [await drafter.propose([*PROMPT] * n, THREE) for n in (1, 2, 3)] == [Draft()] * 3
    await drafter.close()
    assert inner.calls == ["close", "open 3", "close"]
    assert state.undrafted == 3
    assert [r.getMessage() for r in caplog.records] == [
        "drafter x failed (it broke): decoding without drafts, next trial in 1 s"
    ]


async def test_a_trial_runs_beside_the_rounds_and_brings_the_drafter_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    state = health(clock)
    inner = Scripted(RuntimeError())
    drafter = FallibleDrafter(inner, state)
    await drafter.open(PROMPT)
    clock.now += 1.0
    inner.error, inner.gate, inner.calls = None, asyncio.Event(), []
    for n in range(4, 7):
        assert await asyncio.wait_for(drafter.propose([0] * n, THREE), HANG) == Draft()  # nobody waits for the trial
        await turns()
    assert inner.calls == ["close", "open 4"]
    inner.gate.set()
    await turns()
    assert state.up
    assert await drafter.propose([0] * 7, THREE) == Draft((7,))
    assert inner.calls == ["close", "open 4", "propose 4", "propose 7"]
    await drafter.close()
    assert [r.getMessage() for r in caplog.records] == [
        "drafter x failed (RuntimeError): decoding without drafts, next trial in 1 s",
        "drafter x is back after 1.0 s; 3 rounds went undrafted so far",
    ]


async def test_a_refusal_is_the_requests_own_and_tried_again_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    state = health(clock)
    full = Scripted(DrafterRefused("no slot"))
    refused = FallibleDrafter(full, state, Backoff(clock, 1.0, 30.0))
    await refused.open(PROMPT)
    assert await refused.propose(PROMPT, THREE) == Draft() and state.up
    other = FallibleDrafter(Scripted(), state)
    await other.open(PROMPT)
    assert await other.propose(PROMPT, THREE) == Draft((7,))
    full.error = None
    clock.now += 1.0
    assert await refused.propose(PROMPT, THREE) == Draft()
    await turns()
    assert await refused.propose(PROMPT, THREE) == Draft((7,))
    assert not caplog.records


async def test_closing_ends_a_trial_under_way() -> None:
    clock, before = Clock(), asyncio.all_tasks()
    inner = Scripted(RuntimeError())
    drafter = FallibleDrafter(inner, health(clock))
    await drafter.open(PROMPT)
    clock.now += 1.0
    inner.error, inner.gate = None, asyncio.Event()
    await drafter.propose(PROMPT, THREE)
    await turns()
    await asyncio.wait_for(drafter.close(), HANG)
    assert inner.calls[-2:] == ["open 3", "close"]
    assert asyncio.all_tasks() == before
