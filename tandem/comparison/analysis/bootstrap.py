"""How sure a figure is: bootstrap over prompts (Efron 1979). Pure; the same input gives the same interval."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
LEAST_UNITS = 3
"""Below this many prompts a resample says nothing."""

Interval = tuple[float, float]
Floats = NDArray[np.float64]


def resampled(units: int, seed: int = 0) -> NDArray[np.int64]:
    """Indices [RESAMPLES, units] of prompts drawn with replacement."""
    return np.random.default_rng(seed).integers(0, units, (RESAMPLES, units))


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> Interval | None:
    """95 % interval of sum(numerators) / sum(denominators), one pair a prompt; None for too few prompts."""
    if len(numerators) < LEAST_UNITS:
        return None
    chosen = resampled(len(numerators))
    above, below = np.asarray(numerators, float)[chosen].sum(1), np.asarray(denominators, float)[chosen].sum(1)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return percentiles(above / below)


def percentiles(values: Floats) -> Interval | None:
    """The middle 95 % of what is finite; None if less than half is."""
    finite = values[np.isfinite(values)]
    if 2 * len(finite) < len(values) or not len(finite):
        return None
    low, high = np.percentile(finite, (2.5, 97.5))
    return float(low), float(high)
