"""A step's seconds as fixed + slope * size, neither below 0: non-negative least squares of a line, and how sure. Pure.

Plain least squares puts a part below 0 where a busy machine bends the points. A step cannot cost that, so the nearest
line that it can cost is taken (Lawson and Hanson 1974; with two columns the active set has a closed form), and the fit
says which part the constraint held at 0 and what it would have been.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.comparison.analysis.bootstrap import LEAST_UNITS, RESAMPLES, Interval, percentiles

FIXED, SLOPE = "fixed", "slope"
ROUNDING = 1e-9
"""Of the mean time: what least squares puts this little below 0 is rounding, not the constraint."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LineFit:
    """Seconds, and seconds for each unit of size; with 95 % intervals (bootstrap over requests), None for too few.

    held: the part that is 0 because least squares alone would have put it below, at `unheld_s`; None where neither.
    """

    fixed_s: float
    slope_s: float
    fixed_interval_s: Interval | None = None
    slope_interval_s: Interval | None = None
    held: str | None = None
    unheld_s: float | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """One request: what its steps took and how large they were, each as a sum over `steps` of them."""

    seconds: float
    size: float
    steps: int


def non_negative_line(sizes: Floats, seconds: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """(fixed, slope, fixed and slope of plain least squares) along the last axis of arrays of the same shape.

    Exact: where least squares is negative in one part, the optimum lies on that part's axis, since seconds and sizes
    are not negative. Where all sizes are one the slope is 0.
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


def fit_line(groups: Sequence[Sequence[Point]]) -> LineFit:
    """Through one mean for each group of requests. Raises ValueError where nothing was measured."""
    groups = [group for group in groups if sum(point.steps for point in group)]
    if not groups:
        raise ValueError("step times: none were measured")
    sizes, seconds = (np.array([each]) for each in zip(*(_mean(group) for group in groups), strict=True))
    (fixed,), (slope,), (free_fixed,), (free_slope,) = non_negative_line(sizes, seconds)
    intervals = _intervals(groups)
    tolerance = ROUNDING * float(seconds.mean())
    held = SLOPE if free_slope * sizes.mean() < -tolerance else FIXED if free_fixed < -tolerance else None
    unheld = {SLOPE: float(free_slope), FIXED: float(free_fixed), None: None}[held]
    return LineFit(float(fixed), float(slope), *intervals, held, unheld)


def _mean(group: Sequence[Point]) -> tuple[float, float]:
    """(size, seconds) of a step."""
    steps = sum(point.steps for point in group)
    return sum(point.size for point in group) / steps, sum(point.seconds for point in group) / steps


def _intervals(groups: Sequence[Sequence[Point]]) -> tuple[Interval | None, Interval | None]:
    """Of (fixed, slope), requests drawn again within their groups; None where most groups are one request."""
    requests = sum(map(len, groups))
    if requests < max(LEAST_UNITS, 2 * len(groups)):
        return None, None
    random = np.random.default_rng(0)
    sizes, seconds = (np.empty((RESAMPLES, len(groups))) for _ in range(2))
    for i, group in enumerate(groups):
        chosen = random.integers(0, len(group), (RESAMPLES, len(group)))
        size, second, steps = (
            np.array([getattr(point, name) for point in group], float)[chosen].sum(1)
            for name in ("size", "seconds", "steps")
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            sizes[:, i], seconds[:, i] = size / steps, second / steps
    whole = np.isfinite(sizes).all(1)  # a resample may hold nothing but requests without a step
    fixed, slope, _, _ = non_negative_line(sizes[whole], seconds[whole])
    return percentiles(fixed), percentiles(slope) if len(groups) > 1 else None


def fit_as_json(fit: LineFit) -> Mapping[str, Any]:
    """See comparison.schema.json."""
    return {
        "held_at_0": fit.held,
        "unheld_s": fit.unheld_s,
        "fixed_interval_s": list(fit.fixed_interval_s) if fit.fixed_interval_s else None,
        "slope_interval_s": list(fit.slope_interval_s) if fit.slope_interval_s else None,
    }
