"""Intervals of ratios over prompts."""

from __future__ import annotations

import random

import pytest

from tandem.comparison.analysis.bootstrap import ratio_interval


def test_equal_prompts_leave_no_doubt() -> None:
    low, high = ratio_interval([2.0] * 5, [4.0] * 5) or (0, 0)
    assert (low, high) == pytest.approx((0.5, 0.5))


def test_too_few_prompts_say_nothing() -> None:
    assert ratio_interval([1.0, 2.0], [1.0, 1.0]) is None
    assert ratio_interval([], []) is None


def test_nothing_to_divide_by_says_nothing() -> None:
    assert ratio_interval([1.0] * 5, [0.0] * 5) is None


def test_the_same_input_gives_the_same_interval() -> None:
    values = [random.Random(1).random() for _ in range(9)]
    assert ratio_interval(values, [1.0] * 9) == ratio_interval(values, [1.0] * 9)


def test_the_true_mean_is_inside_about_nineteen_times_of_twenty() -> None:
    rng = random.Random(3)
    inside = 0
    for _ in range(200):
        found = ratio_interval([rng.gauss(10, 2) for _ in range(30)], [1.0] * 30)
        assert found is not None
        inside += found[0] <= 10 <= found[1]
    assert 178 <= inside <= 198
