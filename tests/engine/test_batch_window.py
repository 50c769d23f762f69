"""Whether a step waits for rows that are on their way back, and how long."""

from __future__ import annotations

import pytest

from tandem.engine.batcher import FEW, KEPT, PAYS, SLACK, TRIED, BatchWindow
from tandem.speculation.estimate import Line

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


def device(fixed: float, each: float, steps: int = 40, noise: float = 0.0) -> list[tuple[int, float]]:
    """Steps of 1 to 4 rows, by rows and seconds; every other one takes `noise` longer."""
    return [(rows := 1 + at % 4, fixed + each * rows + noise * (at // 4 % 2)) for at in range(steps)]


@pytest.mark.parametrize(("fixed", "each"), [(0.02, 0.0), (0.01, 0.004), (0.0, 0.01)])
def test_the_part_that_does_not_grow_with_the_rows_is_found(fixed: float, each: float) -> None:
    line, steps = Line(0.0), device(fixed, each)
    for rows, seconds in steps:
        line.note(rows, seconds)
    assert line.fixed_share == pytest.approx(fixed / (fixed + each * 2.5), abs=0.08)


def test_steps_that_always_have_as_many_rows_say_nothing_of_what_sharing_saves() -> None:
    line = Line(0.0)
    assert line.fixed_share == 1
    for _ in range(100):
        line.note(3, 0.01)
    assert line.fixed_share == 1


def test_late_steps_do_not_hide_that_rows_cost() -> None:
    line = Line(0.0)
    for rows, seconds in device(0.0, 0.01, noise=0.005):
        line.note(rows, seconds)
    assert line.fixed_share < 0.3


def test_where_rows_are_served_one_after_the_other_nobody_is_waited_for() -> None:
    """The device would idle meanwhile: the step takes as much longer as the row would have taken alone."""
    window, alike = BatchWindow(), BatchWindow()
    for at, (rows, seconds) in enumerate(device(0.0, STEP)):
        window.answered(rows, float(at), seconds)
        alike.answered(rows, float(at), STEP)
    window.returned(99, busy=False)
    assert alike.seconds(39.0, missing=1) == pytest.approx(TRIED * STEP)
    assert window.seconds(39.0, missing=1) == 0


def test_the_time_of_prompts_is_not_taken_for_that_of_rows() -> None:
    window = BatchWindow()
    for at, (rows, _) in enumerate(device(0.0, STEP)):
        window.answered(rows, float(at), STEP)
        window.answered(1, float(at) + 0.5, 50 * STEP, beside_prompts=True)
    window.answered(1, 50.0, STEP)
    assert window.seconds(50.0, missing=1) > 0


def test_what_sharing_saves_is_known_apart_for_each_kind_of_step() -> None:
    """Comparing a verification of two rows with a proposal of one would not say what a row costs."""
    window = BatchWindow()
    for at in range(40):
        window.answered(2, float(at), STEP, "verify")
        window.answered(1, float(at) + 0.5, STEP / 5, "propose")
    window.answered(2, 40.0, STEP, "verify")
    assert window.seconds(40.0, missing=1, kind="verify") > 0
