"""exp, log and sums that have the same bits everywhere: how exact they are, and that their order is as declared."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from tandem.speculation.elementary import LANES, exp, log, total


def ulps(found: np.ndarray, expected: list[float]) -> float:
    """The largest distance, in units of the last place of what is expected."""
    return max(abs(a - b) / math.ulp(b) for a, b in zip(found.tolist(), expected, strict=True))


def arguments(low: float, high: float, count: int = 200_000) -> np.ndarray:
    return np.random.default_rng(5).uniform(low, high, count)


@pytest.mark.parametrize(("low", "high"), [(-708, 709), (-40, 0), (-1, 1), (-1e-6, 1e-6)])
def test_exp_is_that_of_the_mathematical_library_but_for_one_last_place(low: float, high: float) -> None:
    x = arguments(low, high)
    assert ulps(exp(x), [math.exp(each) for each in x.tolist()]) <= 1


def test_log_is_that_of_the_mathematical_library_but_for_one_last_place() -> None:
    uniforms = ((np.random.default_rng(6).integers(0, 2**52, 200_000)).astype(np.float64) + 0.5) * 2.0**-52
    for x in (uniforms, 1 - uniforms / 1e6, -log(uniforms), np.exp2(arguments(-1022, 1023)), arguments(0.5, 2)):
        assert ulps(log(x), [math.log(each) for each in x.tolist()]) <= 1


def test_what_lies_beyond_their_ranges_is_as_declared() -> None:
    assert exp([-np.inf, -1e300, -709.0, -708.0000001]).tolist() == [0.0] * 4
    assert exp([0.0, -0.0]).tolist() == [1.0, 1.0]
    assert exp(-708.0) > 0
    assert exp([1e300, np.inf]).tolist() == exp([709.0, 709.0]).tolist()
    assert log([0.0, 5e-324, 2.0**-1022]).tolist() == [log(2.0**-1022)] * 3
    assert log(1.0) == 0.0
    assert not np.any(np.isnan(exp(np.array([-np.inf, np.inf, 5e-324, -5e-324]))))


def test_they_are_monotonic_enough_for_probabilities_to_be_ordered() -> None:
    x = np.sort(arguments(-40, 0))
    assert (np.diff(exp(x)) >= 0).all()


def test_shapes_are_kept_and_blocks_change_nothing() -> None:
    x = arguments(-5, 0, 7 * 1111).reshape(7, 1111)
    assert exp(x).shape == x.shape and exp(-1.5).shape == ()
    assert exp(x).tolist() == [[float(exp(each)) for each in row] for row in x.tolist()]
    assert exp(x[:, ::2]).tolist() == exp(x)[:, ::2].tolist()


@pytest.mark.parametrize("count", [0, 1, 2, LANES - 1, LANES, LANES + 1, 300, 49152, 50_001])
def test_a_sum_is_added_in_the_order_declared(count: int) -> None:
    values = np.random.default_rng(count).lognormal(0, 9, count)
    lanes = [0.0] * LANES
    for i, value in enumerate(values.tolist()):
        lanes[i % LANES] += value
    expected = 0.0
    for lane in lanes:
        expected += lane
    assert total(values) == expected
    exact = sum(map(Fraction, values.tolist()), Fraction(0))
    assert abs(Fraction(expected) - exact) <= exact * Fraction(1, 2**45)
