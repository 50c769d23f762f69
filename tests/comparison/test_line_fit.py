"""Lines through step times: never below 0, nearest of all that are not, and how sure."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.comparison.analysis.line_fit import FIXED, SLOPE, Floats, fit_line, non_negative_line


def points(*pairs: tuple[float, float]) -> list[Floats]:
    """A group of one request of one step for every (size, seconds)."""
    return [np.array([[seconds, size, 1.0]]) for size, seconds in pairs]


def test_a_line_is_found_again_and_nothing_held() -> None:
    fit = fit_line(points((1, 31.0), (3, 33.0), (6, 36.0)))
    assert (fit.fixed_s, fit.slope_s) == pytest.approx((30.0, 1.0))
    assert fit.held is None


def test_one_size_is_all_fixed() -> None:
    fit = fit_line(points((4, 8.0)))
    assert (fit.fixed_s, fit.slope_s, fit.held) == (8.0, 0.0, None)


def test_a_falling_slope_and_a_negative_start_are_held_at_0_and_told() -> None:
    falling = fit_line(points((1, 9.0), (5, 7.0)))
    assert (falling.fixed_s, falling.slope_s, falling.held) == (8.0, 0.0, SLOPE)
    assert falling.unheld_s == pytest.approx(-0.5)
    steep = fit_line(points((1, 1.0), (2, 4.0), (3, 9.0)))
    assert (steep.fixed_s, steep.held) == (0.0, FIXED)
    assert steep.slope_s == pytest.approx((1 + 8 + 27) / 14)
    assert steep.unheld_s == pytest.approx(14 / 3 - 8)


times = st.floats(0, 1e4)
pairs = st.lists(st.tuples(st.floats(1, 64), times), min_size=1, max_size=8)


@given(pairs)
def test_no_other_non_negative_line_is_nearer(measured: list[tuple[float, float]]) -> None:
    """The conditions of Karush, Kuhn and Tucker, which decide for a convex problem."""
    sizes, seconds = (np.array([each]) for each in zip(*measured, strict=True))
    (fixed,), (slope,), _, _ = non_negative_line(sizes, seconds)
    assert fixed >= 0
    assert slope >= 0
    left = seconds[0] - fixed - slope * sizes[0]
    scale = 1e-6 * (1 + seconds.max()) * sizes.max() ** 2 * len(measured)
    if np.ptp(sizes) > 1e-3:
        for part, gradient in ((fixed, left.sum()), (slope, (left * sizes[0]).sum())):
            assert gradient <= scale
            if part > 1e-6 * (1 + seconds.max()):
                assert abs(gradient) <= scale


def test_requests_that_agree_give_a_narrow_interval_and_others_a_wide_one() -> None:
    def groups(noise: float) -> list[Floats]:
        random = np.random.default_rng(1)
        return [
            np.array([[20 * (30 + g + random.normal(0, noise)), 20.0 * g, 20.0] for _ in range(4)]) for g in range(1, 6)
        ]

    sure, unsure = fit_line(groups(0.01)), fit_line(groups(3.0))
    for fit in (sure, unsure):
        assert fit.fixed_interval_s is not None
        assert fit.slope_interval_s is not None
        assert fit.fixed_interval_s[0] <= fit.fixed_s <= fit.fixed_interval_s[1]
    assert sure.fixed_interval_s is not None
    assert unsure.fixed_interval_s is not None
    assert np.diff(sure.fixed_interval_s) < 0.1 < 1 < np.diff(unsure.fixed_interval_s)


def test_where_most_sizes_are_one_request_no_interval_is_claimed() -> None:
    fit = fit_line(points((1, 31.0), (3, 33.0), (6, 36.0)))
    assert (fit.fixed_interval_s, fit.slope_interval_s) == (None, None)


def test_nothing_measured_is_said() -> None:
    with pytest.raises(ValueError, match="step times: none were measured"):
        fit_line([np.zeros((1, 3))])
