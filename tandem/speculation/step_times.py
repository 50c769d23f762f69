"""What steps cost, learned while they run: by how large they were.

Medians of recent steps, so that one slow step changes nothing; and between them a line, fixed + per token, that sizes
not measured here, or not lately, are read from. Pure: seconds come in as arguments.
"""

from __future__ import annotations

import math
from collections import deque

WINDOW = 25  # steps of one size that a median is taken over
FEW = 8  # values that are too few for a median
HALF_LIFE = 400  # steps after which a median that was not refreshed counts half
LEAN = 4.0  # steps that the line counts as, where a size's own median stands beside it; more for every token before
REFRESH = 4  # steps after which times are worked out again


class Recent:
    """The median of the last `WINDOW` values; of a few, the lower quartile: what disturbs a step makes it longer, and a
    size that was measured long only by accident might never be tried again."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=WINDOW)
        self.median: float | None = None
        self.noted_at = 0

    def __len__(self) -> int:
        return len(self._values)

    def note(self, value: float, at: int = 0) -> None:
        self._values.append(value)
        ordered, n = sorted(self._values), len(self._values)
        self.median, self.noted_at = ordered[(n - 1) // (4 if n < FEW else 2)], at


class StepTimes:
    """Seconds of one kind of step, by size and by the `rows` that shared it: of few rows, few rows say most.

    `growing`: the share of a step that is taken to grow with its size before the measurements say (1: all of it).
    """

    def __init__(self, growing: float) -> None:
        self._growing = growing
        self._cells: dict[tuple[int, int], Recent] = {}
        self._tables: dict[tuple[int, int, int], tuple[int, tuple[float, ...]]] = {}
        self.steps = 0

    def note(self, rows: int, size: int, seconds: float) -> None:
        """A step of `rows` rows and this size took so long."""
        self.steps += 1
        self._cells.setdefault((rows, size), Recent()).note(seconds, self.steps)

    def table(self, rows: int, most: int, first: int = 0) -> tuple[float, ...]:
        """Seconds to expect of steps of `rows` rows, of sizes `first` to `first + most`. At least one was noted."""
        found = self._tables.get((rows, most, first))
        if found is None or self.steps >= found[0] + min(REFRESH, found[0]):
            found = (self.steps, self._work_out(rows, range(first, first + most + 1)))
            self._tables[rows, most, first] = found
        return found[1]

    def _work_out(self, rows: int, sizes: range) -> tuple[float, ...]:
        fixed, slope = self._line(rows, sizes)
        lean = LEAN * (1 + sizes[0])
        times = []
        for size in sizes:
            time, cell = fixed + slope * size, self._cells.get((rows, size))
            if cell is not None and cell.median is not None:
                trust = self._trust(cell)
                time = (trust * cell.median + lean * time) / (trust + lean)
            times.append(time)
        return tuple(times)

    def _trust(self, cell: Recent) -> float:
        return len(cell) * 0.5 ** ((self.steps - cell.noted_at) / HALF_LIFE)

    def _line(self, rows: int, sizes: range) -> tuple[float, float]:
        """(fixed, slope per size) at `rows` rows and about `sizes`: least squares over all medians, near ones counting
        most, with a slope known beforehand that weighs as much as a few steps."""
        points: list[tuple[float, float, float]] = []
        for (r, size), cell in self._cells.items():
            beyond = max(size, 1) / max(sizes[-1], 1) if size > sizes[-1] else max(sizes[0], 1) / max(size, 1)
            away = math.log2(r / rows) ** 2 + (math.log2(beyond) ** 2 if beyond > 1 else 0.0)
            points.append((self._trust(cell) / (1 + 4 * away), float(size), cell.median or 0.0))
        total = sum(w for w, _, _ in points)
        x = sum(w * xi for w, xi, _ in points) / total
        y = sum(w * yi for w, _, yi in points) / total
        expected = self._growing * y / x if x else 0.0
        spread = sum(w * (xi - x) ** 2 for w, xi, _ in points)
        together = sum(w * (xi - x) * (yi - y) for w, xi, yi in points)
        slope = max(0.0, (together + LEAN * expected) / (spread + LEAN))
        return max(0.0, y - slope * x), slope
