"""The batcher: who goes together, in which order, and what one failure does."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from tandem.engine.batcher import FEW, PAYS, SLACK, TRIED, Batcher, BatchWindow, DeviceLost
from tandem.engine.slots import SlotPool
from tandem.runners.protocol import RowFailed
from tests.support import HANG


class Recorder:
    """Steps that note their rows; the first of all holds the device until released."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, list[Any]]] = []
        self.threads: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()

    def a(self, rows: Sequence[Any]) -> list[Any]:
        return self._step("a", rows)

    def b(self, rows: Sequence[Any]) -> list[Any]:
        return self._step("b", rows)

    def _step(self, name: str, rows: Sequence[Any]) -> list[Any]:
        self.steps.append((name, list(rows)))
        self.threads.add(threading.current_thread().name)
        assert self.gate.wait(HANG)
        if "break" in rows:
            raise RuntimeError("the device is gone")
        return [RowFailed("bad row") if row == "bad" else f"{name}{row}" for row in rows]


async def opened() -> tuple[Batcher, Recorder, asyncio.Future[Any]]:
    """A batcher whose device is busy with a first row, so that what follows gathers."""
    batcher, recorder = Batcher("test"), Recorder()
    recorder.gate.clear()
    first = asyncio.ensure_future(batcher.run(recorder.a, "first", 4))
    while not recorder.steps:
        await asyncio.sleep(0.001)
    return batcher, recorder, first


async def gather(*tasks: asyncio.Future[Any]) -> list[Any]:
    results = await asyncio.gather(*tasks, return_exceptions=True)
    return [r if isinstance(r, BaseException) else r.value for r in results]


def queue(batcher: Batcher, step: Any, rows: Sequence[Any], limit: int = 4) -> list[asyncio.Future[Any]]:
    return [asyncio.ensure_future(batcher.run(step, row, limit)) for row in rows]


async def test_rows_of_one_step_go_together_oldest_step_first_in_order() -> None:
    batcher, recorder, first = await opened()
    tasks = [first]
    for step, row in ((recorder.b, 1), (recorder.a, 2), (recorder.b, 3), (recorder.a, 4)):
        tasks += queue(batcher, step, [row])
    await asyncio.sleep(0)
    recorder.gate.set()
    assert await gather(*tasks) == ["afirst", "b1", "a2", "b3", "a4"]
    assert recorder.steps == [("a", ["first"]), ("b", [1, 3]), ("a", [2, 4])]
    assert (batcher.steps, batcher.rows) == (3, 5)
    await batcher.close()


async def test_no_step_is_larger_than_its_limit_and_none_waits_forever() -> None:
    batcher, recorder, first = await opened()
    tasks = queue(batcher, recorder.a, range(7), limit=3)
    await asyncio.sleep(0)
    recorder.gate.set()
    assert await gather(first, *tasks) == ["afirst", *(f"a{i}" for i in range(7))]
    assert [rows for _, rows in recorder.steps] == [["first"], [0, 1, 2], [3, 4, 5], [6]]
    await batcher.close()


async def test_cancelled_rows_never_reach_the_device() -> None:
    batcher, recorder, first = await opened()
    tasks = queue(batcher, recorder.a, range(4))
    await asyncio.sleep(0)
    tasks[1].cancel()
    tasks[3].cancel()
    await asyncio.sleep(0)
    recorder.gate.set()
    results = await gather(first, *tasks)
    assert recorder.steps[1:] == [("a", [0, 2])]
    assert [type(r).__name__ for r in results] == ["str", "str", "CancelledError", "str", "CancelledError"]
    await batcher.close()


async def test_a_failed_row_fails_alone() -> None:
    batcher, recorder, first = await opened()
    tasks = queue(batcher, recorder.a, [1, "bad", 3])
    recorder.gate.set()
    one, bad, three = await gather(*tasks)
    assert (one, three) == ("a1", "a3")
    assert isinstance(bad, RowFailed) and str(bad) == "bad row"
    await gather(first)
    await batcher.close()


async def test_a_broken_step_fails_its_rows_and_the_next_one_runs() -> None:
    batcher, recorder, first = await opened()
    broken = queue(batcher, recorder.a, [1, "break"])
    sound = queue(batcher, recorder.b, [2])
    recorder.gate.set()
    for lost in await gather(*broken):
        assert isinstance(lost, DeviceLost) and "the device is gone" in str(lost)
    assert await gather(first, *sound) == ["afirst", "b2"]
    assert await gather(*queue(batcher, recorder.a, [5])) == ["a5"]
    await batcher.close()


async def test_a_row_says_how_long_it_waited_and_how_long_its_step_took() -> None:
    def slow(rows: Sequence[int]) -> list[int]:
        time.sleep(0.05)
        return list(rows)

    batcher = Batcher("test")
    began = time.perf_counter()
    first = asyncio.ensure_future(batcher.run(slow, 1, 1))
    second = asyncio.ensure_future(batcher.run(slow, 2, 1))
    one, two = await first, await second
    passed = time.perf_counter() - began
    assert min(one.compute_seconds, two.compute_seconds) >= 0.05
    assert 0 <= one.queue_seconds <= passed - one.compute_seconds - two.compute_seconds
    assert one.compute_seconds <= two.queue_seconds <= passed - two.compute_seconds
    await batcher.close()


async def test_closing_cancels_what_waits_and_ends_the_thread() -> None:
    batcher, recorder, first = await opened()
    waiting = queue(batcher, recorder.a, [1])
    await asyncio.sleep(0)
    closing = asyncio.create_task(batcher.close())
    await asyncio.sleep(0.01)
    recorder.gate.set()
    await closing
    assert waiting[0].cancelled()
    first.cancel()
    assert not any(t.name.startswith("device-test") for t in threading.enumerate() if t.is_alive())


async def test_newcomers_prefill_one_chunk_at_a_time_between_the_rounds_of_others() -> None:
    batcher, recorder, first = await opened()
    chunks = [asyncio.ensure_future(batcher.run(recorder.b, f"chunk {i}", 1, prefill=True)) for i in range(4)]
    rounds = queue(batcher, recorder.a, ["one", "two"])
    await asyncio.sleep(0.01)
    recorder.gate.set()
    await gather(first, *chunks, *rounds)
    assert recorder.steps[1:] == [
        ("b", ["chunk 0"]),
        ("a", ["one", "two"]),
        ("b", ["chunk 1"]),
        ("b", ["chunk 2"]),
        ("b", ["chunk 3"]),
    ]
    await batcher.close()


@pytest.mark.parametrize(("open_sequences", "turns"), [(1, 0), (2, 8)])
async def test_a_step_begins_once_every_open_sequence_is_here_and_else_after_some_turns(
    open_sequences: int, turns: int
) -> None:
    batcher, recorder, slots = Batcher("test"), Recorder(), SlotPool(4)
    batcher.serves(slots)
    for _ in range(open_sequences):
        slots.take()
    count, began, begin = 1, [], batcher._begin  # it is tried at once, and in each turn

    def noted() -> None:
        began.append(count)
        begin()

    batcher._begin = noted  # type: ignore[method-assign]
    row = asyncio.ensure_future(batcher.run(recorder.a, "row", 4))
    while not began:
        await asyncio.sleep(0)
        count += 1
    assert turns <= began[0] <= turns + 2
    await row
    await batcher.close()


STEP = 0.010


def rounds(window: BatchWindow, back_after: float, count: int, busy: bool = False, start: float = 0.0) -> float:
    """So many rounds of one row that comes back after so many seconds; returns when the last ended."""
    now = start
    for _ in range(count):
        window.answered(1, now, STEP)
        window.returned(now + back_after, busy)
        now += back_after + STEP
    window.answered(1, now, STEP)
    return now


def test_rows_that_come_back_soon_are_waited_for() -> None:
    window = BatchWindow()
    now = rounds(window, 0.002, FEW)
    assert window.seconds(now, missing=1) == pytest.approx(SLACK * 0.002)
    assert window.seconds(now + 0.001, missing=1) == pytest.approx(SLACK * 0.002 - 0.001)
    assert window.seconds(now + SLACK * 0.002, missing=1) == 0


def test_rows_that_stay_away_for_a_step_or_more_are_not() -> None:
    window = BatchWindow()
    now = rounds(window, 0.021, FEW)
    assert window.seconds(now, missing=1) == 0
    assert PAYS * STEP < SLACK * 0.021


def test_where_rows_are_served_one_after_the_other_nobody_is_waited_for() -> None:
    """The device would idle meanwhile: the step takes as much longer as the row would have taken alone."""
    window, alike = BatchWindow(), BatchWindow()
    for at in range(40):
        window.answered(1 + at % 4, float(at), STEP * (1 + at % 4))
        alike.answered(1 + at % 4, float(at), STEP)
    window.returned(99, busy=False)
    assert alike.seconds(39.0, missing=1) == pytest.approx(TRIED * STEP)
    assert window.seconds(39.0, missing=1) == 0
