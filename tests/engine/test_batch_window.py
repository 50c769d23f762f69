"""Whether a step waits for rows that are on their way back, and how long."""

from __future__ import annotations

import pytest

from tandem.engine.batch_window import FEW, KEPT, PAYS, SLACK, TRIED, BatchWindow

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


def test_nobody_is_waited_for_who_is_here_or_gone() -> None:
    window = BatchWindow()
    now = rounds(window, 0.002, FEW)
    assert window.seconds(now, missing=0) == 0, "every open sequence is here"
    window.returned(now + 0.001, busy=False)
    assert window.seconds(now + 0.001, missing=3) == 0, "those that were answered are here; others are idle"


def test_a_short_wait_is_tried_while_nothing_is_known() -> None:
    window = BatchWindow()
    window.answered(1, 0.0, STEP)
    assert window.seconds(0.0, missing=1) == pytest.approx(TRIED * STEP)


def test_what_comes_beside_a_step_teaches_nothing_unless_it_was_waited_for() -> None:
    """Two that take turns: each comes back late because the other's step has the cores. Trials must go on."""
    window = BatchWindow()
    now = rounds(window, 0.012, KEPT, busy=True)
    assert window.seconds(now, missing=1) == pytest.approx(TRIED * STEP)
    for _ in range(FEW):
        window.answered(1, now, STEP)
        assert window.seconds(now, missing=1) > 0
        window.returned(now + 0.012, busy=True)
        now += 0.022
    window.answered(1, now, STEP)
    assert window.seconds(now, missing=1) == 0, "waited for and never in time"
