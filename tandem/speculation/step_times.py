"""Estimates times online: the seconds of steps by their size, and the times of a remote target.

Each step size has the median of its recent steps, so that one slow step changes nothing. Sizes that were not measured,
or not recently, are read from a line (fixed + slope * size) fitted to the medians. Seconds are arguments; no clock is
read.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass

WINDOW = 25  # steps of one size that a median is taken over
FEW = 8  # with fewer values the lower quartile is used
HALF_LIFE = 400  # steps without a new value after which a median counts half
LINE_WEIGHT = 4.0  # steps that the line counts as beside a size's own median, per token of the smallest size + 1
REFRESH = 4  # steps after which tables are computed again
MOST_CELLS = 1024  # sizes that are remembered: a server could report any
SMOOTHING = 0.2  # weight of a new time in a smoothed one


class RecentMedian:
    """The median of the last WINDOW values, or the lower quartile while there are fewer than FEW.

    Disturbances only make steps longer, and a size whose first measurement was too long might never be tried again.
    """

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=WINDOW)
        self.median: float | None = None
        self.noted_at = 0

    def __len__(self) -> int:
        return len(self._values)

    def note(self, value: float, at: int = 0) -> None:
        """Adds a value; `at` is the number of the step it comes from."""
        self._values.append(value)
        ordered, n = sorted(self._values), len(self._values)
        self.median, self.noted_at = ordered[(n - 1) // (4 if n < FEW else 2)], at


class StepTimes:
    """Seconds of one kind of step, by its size and the `rows` that shared it.

    `growing_share`: the share of a step's time assumed to grow with its size until measurements show it (1: all of it).
    """

    def __init__(self, growing_share: float) -> None:
        self._growing_share = growing_share
        self._cells: defaultdict[tuple[int, int], RecentMedian] = defaultdict(RecentMedian)
        self._tables: dict[tuple[int, int, int], tuple[int, tuple[float, ...]]] = {}
        self.steps = 0

    def note(self, rows: int, size: int, seconds: float) -> None:
        """Records that a step of `rows` rows and this size took `seconds`."""
        self.steps += 1
        self._cells[rows, size].note(seconds, self.steps)
        if len(self._cells) > MOST_CELLS:
            del self._cells[min(self._cells, key=lambda cell: self._cells[cell].noted_at)]

    def table(self, rows: int, most: int, first: int = 0) -> tuple[float, ...]:
        """Returns the expected seconds of steps of `rows` rows and sizes `first` to `first + most`.

        At least one step must have been recorded.
        """
        found = self._tables.get((rows, most, first))
        if found is None or self.steps >= found[0] + min(REFRESH, found[0]):
            found = (self.steps, self._compute(rows, range(first, first + most + 1)))
            if len(self._tables) >= MOST_CELLS:
                self._tables.clear()
            self._tables[rows, most, first] = found
        return found[1]

    def _compute(self, rows: int, sizes: range) -> tuple[float, ...]:
        fixed, slope = self._line(rows, sizes)
        line_weight = LINE_WEIGHT * (1 + sizes[0])
        times = []
        for size in sizes:
            time, cell = fixed + slope * size, self._cells.get((rows, size))
            if cell is not None and cell.median is not None:
                weight = self._weight(cell)
                time = (weight * cell.median + line_weight * time) / (weight + line_weight)
            times.append(time)
        return tuple(times)

    def _weight(self, cell: RecentMedian) -> float:
        """Returns the number of values in `cell`, discounted by their age."""
        return len(cell) * 0.5 ** ((self.steps - cell.noted_at) / HALF_LIFE)

    def _line(self, rows: int, sizes: range) -> tuple[float, float]:
        """Returns (fixed, slope per size) at `rows` rows near `sizes`: a least-squares fit to all medians.

        Nearby medians count most, and a prior slope weighs as much as a few steps.
        """
        points: list[tuple[float, float, float]] = []
        for (r, size), cell in self._cells.items():
            beyond = max(size, 1) / max(sizes[-1], 1) if size > sizes[-1] else max(sizes[0], 1) / max(size, 1)
            away = math.log2(r / rows) ** 2 + (math.log2(beyond) ** 2 if beyond > 1 else 0.0)
            points.append((self._weight(cell) / (1 + 4 * away), float(size), cell.median or 0.0))
        total = sum(w for w, _, _ in points)
        x = sum(w * xi for w, xi, _ in points) / total
        y = sum(w * yi for w, _, yi in points) / total
        expected = self._growing_share * y / x if x else 0.0
        spread = sum(w * (xi - x) ** 2 for w, xi, _ in points)
        together = sum(w * (xi - x) * (yi - y) for w, xi, yi in points)
        slope = max(0.0, (together + LINE_WEIGHT * expected) / (spread + LINE_WEIGHT))
        return max(0.0, y - slope * x), slope


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one draft token, of one verification, and of a network round trip."""

    draft: float
    verify: float
    rtt: float


@dataclass(slots=True)
class MeasuredTimes:
    """Exponentially smoothed times of the requests that draft here and verify at one remote target."""

    _draft: float | None = None
    _verify: float | None = None
    _rtt: float | None = None

    def drafted(self, tokens: int, seconds: float) -> None:
        """Records a draft of `tokens` tokens that took `seconds`."""
        if tokens:
            self._draft = _smoothed(self._draft, seconds / tokens)

    def verified(self, verify_seconds: float, network_seconds: float | None) -> None:
        """Records a verification: its seconds at the target, and those of the network there and back, if known."""
        self._verify = _smoothed(self._verify, verify_seconds)
        if network_seconds is not None:
            self._rtt = _smoothed(self._rtt, network_seconds)

    def travelled(self, network_seconds: float) -> None:
        """Records the seconds of a round trip."""
        self._rtt = _smoothed(self._rtt, network_seconds)

    @property
    def known(self) -> Times | None:
        """The smoothed times, or None until each was measured once."""
        if self._draft is None or self._verify is None or self._rtt is None:
            return None
        return Times(self._draft, self._verify, self._rtt)


def _smoothed(before: float | None, now: float) -> float:
    return now if before is None else before + SMOOTHING * (now - before)
