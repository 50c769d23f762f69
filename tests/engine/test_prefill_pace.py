"""When pages from elsewhere are too slow: pure, with times as arguments."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.prefill_pace import Pace, PrefillTimes


def test_long_chunks_and_recent_ones_count_more() -> None:
    times = PrefillTimes()
    assert times.per_token is None
    times.note(100, 1.0)
    assert times.per_token == pytest.approx(0.01)
    times.note(1, 1.0)  # the end of a prompt
    assert times.per_token == pytest.approx(1.9 / 91)
    for _ in range(100):
        times.note(100, 3.0)
    assert times.per_token == pytest.approx(0.03, rel=0.01)


def test_what_comes_before_the_first_pages_or_was_never_measured_is_no_pace() -> None:
    assert Pace(0.1, 1.0).left(1000.0) == math.inf
    unknown = Pace(None, 1.0)
    unknown.came(1, 0.0)
    assert unknown.left(1000.0) == math.inf


def given_up(in_place: float, elsewhere: float, pages: int, together: int = 1) -> float | None:
    """How long after the first of `pages` the rest is given up, with a second to spare; None if all come."""
    pace, now, wait = Pace(in_place, 1.0), 0.0, elsewhere * together
    for _ in range(pages // together - 1):
        pace.came(together, now)
        if (left := pace.left(now)) < wait:
            return now + max(0.0, left)
        now += wait
    return None


def test_nine_hundred_tokens_that_trickle_cost_a_second_and_not_forty_five() -> None:
    waited = given_up(in_place=0.04 / 56, elsewhere=45 / 56, pages=56)
    assert waited is not None and waited < 1.1


@pytest.mark.parametrize(("times", "given"), [(0.5, False), (1.21, False), (1.99, False), (2.3, True), (10.0, True)])
@pytest.mark.parametrize("together", [1, 32])
def test_pages_may_take_twice_as_long_as_here(times: float, given: bool, together: int) -> None:
    assert (given_up(0.01, 0.01 * times, 2000, together) is not None) == given


@given(
    st.floats(1e-5, 1.0), st.floats(0.0, 5.0), st.lists(st.tuples(st.integers(1, 64), st.floats(0.0, 20.0)), min_size=1)
)
def test_a_transfer_never_takes_much_more_than_twice_its_time_in_place(
    in_place: float, spare: float, arrivals: list[tuple[int, float]]
) -> None:
    pace, now, came = Pace(in_place, spare), 0.0, 0
    pace.came(arrivals[0][0], now)
    for pages, after in arrivals[1:]:
        left = pace.left(now)
        if after > left:
            now += max(0.0, left)
            break
        now, came = now + after, came + pages
        pace.came(pages, now)
    assert now <= (spare + 2 * in_place * (came + 64)) * 1.001
