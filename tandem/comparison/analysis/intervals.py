"""The 95 % interval of a ratio of two sums, paired by prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Interval = tuple[float, float]

# 97.5 % points of t with 1, 2, ... degrees of freedom; `_student` approximates the rest
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def paired_interval(numerators: Sequence[float], denominators: Sequence[float]) -> Interval | None:
    """Returns the 95 % interval of sum(numerators) / sum(denominators); None for a single prompt.

    Student's t on the logarithm of the ratio (delta method): a bootstrap is too narrow with few prompts.
    """
    above, below = np.asarray(numerators, float), np.asarray(denominators, float)
    units = len(above)
    if units < 2 or not (above.sum() > 0 and below.sum() > 0):
        return None
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        apart = above / above.mean() - below / below.mean()
        error = _student(units - 1) * float(np.sqrt((apart**2).sum() / units / (units - 1)))
        middle = float(above.sum() / below.sum())
    if not (0 < middle < math.inf and error < 700):  # exp(700) is still a number
        return None
    low, high = middle * math.exp(-error), middle * math.exp(error)
    return (low, high) if math.isfinite(high) else None


def _student(freedom: int) -> float:
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    z = 1.95996
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
