"""Computes bootstrap confidence intervals over prompts (Efron 1979). Deterministic: the seed is fixed."""

from __future__ import annotations

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
