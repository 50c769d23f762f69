"""Whether a step waits for rows that are on their way back, and how long."""

from __future__ import annotations

import pytest

from tandem.engine.batcher import FEW, PAYS, SLACK, TRIED, BatchWindow

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


def device(fixed: float, each: float, steps: int = 40, noise: float = 0.0) -> list[tuple[int, float]]:
    """Steps of 1 to 4 rows, by rows and seconds; every other one takes `noise` longer."""
    return [(rows := 1 + at % 4, fixed + each * rows + noise * (at // 4 % 2)) for at in range(steps)]


def test_where_rows_are_served_one_after_the_other_nobody_is_waited_for() -> None:
    """The device would idle meanwhile: the step takes as much longer as the row would have taken alone."""
    window, alike = BatchWindow(), BatchWindow()
    for at, (rows, seconds) in enumerate(device(0.0, STEP)):
        window.answered(rows, float(at), seconds)
        alike.answered(rows, float(at), STEP)
    window.returned(99, busy=False)
    assert alike.seconds(39.0, missing=1) == pytest.approx(TRIED * STEP)
    assert window.seconds(39.0, missing=1) == 0
