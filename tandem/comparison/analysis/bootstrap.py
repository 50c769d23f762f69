"""Computes confidence intervals over prompts: by bootstrap (Efron 1979, fixed seed), or paired by Student's t."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
MIN_UNITS = 3
"""The minimum number of prompts for an interval."""

Interval = tuple[float, float]
Floats = NDArray[np.float64]


def resampled(units: int, seed: int = 0) -> NDArray[np.int64]:
    """Draws prompts with replacement. Returns int64 indices [RESAMPLES, units]."""
    return np.random.default_rng(seed).integers(0, units, (RESAMPLES, units))


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> Interval | None:
    """Returns the 95 % interval of sum(numerators) / sum(denominators), one pair per prompt; None for too few."""
    if len(numerators) < MIN_UNITS:
        return None
    chosen = resampled(len(numerators))
    above, below = np.asarray(numerators, float)[chosen].sum(1), np.asarray(denominators, float)[chosen].sum(1)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return percentiles(above / below)


def percentiles(values: Floats) -> Interval | None:
    """Returns the middle 95 % of the finite values [n] float64; None if less than half are finite."""
    finite = values[np.isfinite(values)]
    if 2 * len(finite) < len(values) or not len(finite):
        return None
    low, high = np.percentile(finite, (2.5, 97.5))
    return float(low), float(high)


STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The 97.5 % points of Student's t with 1, 2, ... degrees of freedom; beyond them `_student` approximates."""


def paired_interval(numerators: Sequence[float], denominators: Sequence[float]) -> Interval | None:
    """Returns the 95 % interval of sum(numerators) / sum(denominators), paired by prompt; None for a single prompt.

    It is that of the logarithm of the ratio (delta method), by Student's t: unlike a bootstrap it does not become too
    narrow with few prompts.
    """
    above, below = np.asarray(numerators, float), np.asarray(denominators, float)
    units = len(above)
    if units < 2 or not (above.sum() > 0 and below.sum() > 0):
        return None
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        apart = above / above.mean() - below / below.mean()
        error = _student(units - 1) * float(np.sqrt((apart**2).sum() / units / (units - 1)))
        middle = float(above.sum() / below.sum())
    if not (math.isfinite(error) and 0 < middle < math.inf):
        return None
    low, high = middle * math.exp(-error), middle * math.exp(error)
    return (low, high) if math.isfinite(high) else None


def _student(freedom: int) -> float:
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    z = 1.95996
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
