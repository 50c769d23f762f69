"""A step that hangs: when it counts as one, who is told, and what becomes of the device."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tandem.engine.batcher import Batcher, DeviceLost, StepHung
from tandem.engine.engine import Engine
from tandem.engine.step_watch import FADES, FIRST_SECONDS, MIN_SECONDS, TIMES_LONGEST, StepBound, StepWatch
from tandem.runners.protocol import PrefillRow, VerifyRow
from tests.support import toy, until
from tests.toy import ToyRunner

PROMPT = list(b"a prompt of more than one chunk, though not by much")
BOUND = 8.0


class Gated(ToyRunner):
    """Its steps wait while the gate is closed; `breaks`: one that had to then fails."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gate = threading.Event()
        self.gate.set()
        self.inside = threading.Event()
        self.breaks = False

    def work(self) -> None:
        super().work()
        if not self.gate.is_set():
            self.inside.set()
            assert self.gate.wait(20)
            if self.breaks:
                raise RuntimeError("the device was reset")


@dataclass
class Bench:
    """An engine that is watched, by a clock that only the test moves."""

    runner: Gated
    engine: Engine
    now: float = 0.0
    said: list[bool] = field(default_factory=list)
    lost: list[DeviceLost] = field(default_factory=list)
    watch: StepWatch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = StepWatch(self.engine.batcher, StepBound(BOUND), self._lose, lambda: self.now)
        self.watch.changed = self.said.append

    def _lose(self, error: DeviceLost) -> None:
        self.lost.append(error)
        self.engine.lose(error)

    def look_for(self, seconds: float, every: float = 1.0) -> None:
        for _ in range(round(seconds / every)):
            self.now += every
            self.watch.look()

    async def hang(self, *rows: PrefillRow) -> list[asyncio.Task[Any]]:
        """Tasks of prefills; the first is on the device, which hangs."""
        self.runner.gate.clear()
        tasks = [asyncio.create_task(self.engine.run(self.engine.runner.prefill, row, prefill=True)) for row in rows]
        await until(self.runner.inside.is_set)
        return tasks


@contextlib.asynccontextmanager
async def benched() -> AsyncIterator[Bench]:
    runner = toy(kind=Gated)
    assert isinstance(runner, Gated)
    engine = Engine(runner, Batcher("test"))
    try:
        yield Bench(runner, engine)
    finally:
        runner.gate.set()
        await engine.batcher.close()


ROWS = [PrefillRow(i, 0, (1, 2, 3)) for i in range(3)]


async def test_a_step_beyond_its_bound_fails_its_rows_those_that_wait_and_newcomers() -> None:
    async with benched() as bench:
        tasks = await bench.hang(*ROWS)
        bench.look_for(BOUND)
        assert not any(task.done() for task in tasks) and not bench.said
        bench.look_for(2.0)
        assert bench.said == [False]
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, StepHung)
        with pytest.raises(StepHung, match="without returning"):
            await bench.engine.run(bench.engine.runner.prefill, ROWS[0], prefill=True)
        assert (bench.engine.batcher.hung_steps, bench.lost, bench.engine.lost.is_set()) == (1, [], False)


async def test_a_step_that_does_not_come_back_loses_the_engine_once() -> None:
    async with benched() as bench:
        tasks = await bench.hang(ROWS[0])
        bench.look_for(2 * BOUND)
        assert not bench.lost
        bench.look_for(5 * BOUND)
        (error,) = bench.lost
        assert "did not return" in str(error)
        with pytest.raises(DeviceLost, match="did not return"):
            await bench.engine.run(bench.engine.runner.prefill, ROWS[1], prefill=True)
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_step_that_fails_after_it_hung_loses_the_engine() -> None:
    async with benched() as bench:
        tasks = await bench.hang(ROWS[0])
        bench.runner.breaks = True
        bench.look_for(BOUND + 2)
        bench.runner.gate.set()
        await until(lambda: bool(bench.lost))
        assert "the device was reset" in str(bench.lost[0])
        assert bench.said == [False]
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_process_that_stood_still_has_no_step_that_hangs() -> None:
    """SIGSTOP and SIGCONT, a laptop asleep, an event loop that was held up: one look counts for two at most."""
    async with benched() as bench:
        tasks = await bench.hang(ROWS[0])
        bench.look_for(2.0)
        bench.look_for(3600.0, every=3600.0)
        assert not bench.said
        bench.runner.gate.set()
        await asyncio.gather(*tasks)


async def test_closing_does_not_wait_for_a_step_that_was_abandoned() -> None:
    async with benched() as bench:
        tasks = await bench.hang(ROWS[0])
        bench.look_for(BOUND + 2)
        await asyncio.gather(*tasks, return_exceptions=True)
        await bench.engine.batcher.close(seconds=1e9)
        assert bench.engine.batcher.stuck


def test_a_bound_is_learned_for_each_kind_from_its_longest_recent_step() -> None:
    bound = StepBound()
    assert bound.seconds(PrefillRow) == FIRST_SECONDS
    bound.learn(PrefillRow, 0.01)
    assert (bound.seconds(PrefillRow), bound.seconds(VerifyRow)) == (MIN_SECONDS, FIRST_SECONDS)
    bound.learn(PrefillRow, 7.0)
    bound.learn(PrefillRow, 0.01)
    assert bound.seconds(PrefillRow) == pytest.approx(TIMES_LONGEST * 7.0 * FADES)
    for _ in range(5000):
        bound.learn(PrefillRow, 0.01)
    assert bound.seconds(PrefillRow) == MIN_SECONDS


@pytest.mark.parametrize("given", [-1.0, 0.0, float("nan"), float("inf")])
def test_a_bound_that_is_none_is_refused(given: float) -> None:
    with pytest.raises(ValueError, match="step_seconds"):
        StepBound(given)
