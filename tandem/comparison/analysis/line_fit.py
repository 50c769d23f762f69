"""Fits a step's seconds as fixed + slope * size by non-negative least squares, with confidence intervals.

On a busy machine, plain least squares may make a part negative, which no step can cost. The fit is the best line with
no negative part (Lawson and Hanson 1974; with two columns the active set has a closed form), and it reports which part
was held at 0 and its unconstrained value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tandem.comparison.analysis.bootstrap import MIN_UNITS, RESAMPLES, Interval, percentiles
from tandem.comparison.measuring.json_form import HIDDEN, named

FIXED, SLOPE = "fixed", "slope"
ROUNDING = 1e-9
"""A share of the mean time: a part less negative than this is a rounding error, not held at 0."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LineFit:
    """A fitted line in seconds, with 95 % intervals (bootstrap over requests; None for too few).

    held: the part held at 0, whose unconstrained value is `unheld_s`; None if neither is.
    """

    fixed_s: float = field(metadata=HIDDEN)
    slope_s: float = field(metadata=HIDDEN)
    fixed_interval_s: Interval | None = None
    slope_interval_s: Interval | None = None
    held: str | None = field(default=None, metadata=named("held_at_0"))
    unheld_s: float | None = None


def non_negative_line(sizes: Floats, seconds: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Fits lines along the last axis of `sizes` and `seconds`, float64 [..., n].

    Returns (fixed, slope, unconstrained fixed, unconstrained slope), each float64 [...]. The solution is exact: if one
    part is negative, the optimum lies on its axis, since seconds and sizes are not. If all sizes are equal, slope is 0.
    """
    middle, mean = sizes.mean(-1), seconds.mean(-1)
    apart = sizes - middle[..., None]
    spread = (apart**2).sum(-1)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        free_slope = np.where(spread > (1e-9 * middle) ** 2, (apart * seconds).sum(-1) / spread, 0.0)
        free_fixed = mean - free_slope * middle
        through_zero = (sizes * seconds).sum(-1) / (sizes**2).sum(-1)
    falls, below = free_slope < 0, free_fixed < 0
    slope = np.where(falls, 0.0, np.where(below, through_zero, free_slope))
    fixed = np.where(falls, mean, np.where(below, 0.0, free_fixed))
    return fixed, slope, free_fixed, free_slope


def fit_line(groups: Sequence[Floats]) -> LineFit:
    """Fits a line through the mean of each group of requests. Raises ValueError if nothing was measured.

    A group is float64 [requests, 3]: of each, the seconds and the sizes of its steps, summed, and their number.
    """
    groups = [group for group in groups if group[:, 2].sum()]
    if not groups:
        raise ValueError("step times: none were measured")
    totals = np.array([[group.sum(0) for group in groups]])
    seconds, sizes = totals[..., 0] / totals[..., 2], totals[..., 1] / totals[..., 2]
    (fixed,), (slope,), (free_fixed,), (free_slope,) = non_negative_line(sizes, seconds)
    intervals = _intervals(groups)
    tolerance = ROUNDING * float(seconds.mean())
    held = SLOPE if free_slope * sizes.mean() < -tolerance else FIXED if free_fixed < -tolerance else None
    unheld = {SLOPE: float(free_slope), FIXED: float(free_fixed), None: None}[held]
    return LineFit(float(fixed), float(slope), *intervals, held, unheld)


def _intervals(groups: Sequence[Floats]) -> tuple[Interval | None, Interval | None]:
    """Returns intervals of (fixed, slope), resampling requests within groups; None if most groups have one."""
    requests = sum(map(len, groups))
    if requests < max(MIN_UNITS, 2 * len(groups)):
        return None, None
    random = np.random.default_rng(0)
    sizes, seconds = (np.empty((RESAMPLES, len(groups))) for _ in range(2))
    for i, group in enumerate(groups):
        chosen = random.integers(0, len(group), (RESAMPLES, len(group)))
        totals = group[chosen].sum(1)
        with np.errstate(divide="ignore", invalid="ignore"):
            seconds[:, i], sizes[:, i] = totals[:, 0] / totals[:, 2], totals[:, 1] / totals[:, 2]
    whole = np.isfinite(sizes).all(1)  # a resample may contain only requests without a step
    fixed, slope, _, _ = non_negative_line(sizes[whole], seconds[whole])
    return percentiles(fixed), percentiles(slope) if len(groups) > 1 else None
