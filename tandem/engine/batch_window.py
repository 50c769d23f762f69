"""How long a step waits for rows that are on their way back. Pure: seconds are arguments.

Sequences that draft elsewhere come back for their next round a little after their answer. A step of few tokens takes as
long with few rows as with many, so where they come back soon it pays to wait for them: two that take turns, each in a
step of its own, have half of what they would have together, and would take turns for ever.
"""

from __future__ import annotations

import statistics
from collections import deque

KEPT, FEW = 64, 8
SLACK = 2.0
"""Usual returns that are waited for: of several rows the last takes longer than most."""
PAYS = 0.75
"""Of a step's own time: what waiting may take."""
TRIED = 0.3
"""Of a step's own time: what is waited while next to nothing is known."""


class BatchWindow:
    """Of one device: who was answered by its last round, and how long such rows usually stay away.

    Rows that come beside a step say little: whoever drafts may have had to share cores with it. What counts is how long
    they take while the device has nothing to do, or was made to wait for them.
    """

    def __init__(self) -> None:
        self._away = 0
        self._ended = self._step = self._window = 0.0
        self._waited = False
        self._returns: deque[float] = deque(maxlen=KEPT)

    def answered(self, rows: int, now: float, seconds: float) -> None:
        """A round of so many rows ended, that took so long."""
        self._away, self._ended, self._step, self._waited = rows, now, seconds, False
        known = len(self._returns) >= FEW
        self._window = SLACK * statistics.median(self._returns) if known else TRIED * seconds

    def came(self, now: float, busy: bool) -> None:
        """A row is here for its next round; `busy`: while a step was running."""
        if not self._away:
            return
        self._away -= 1
        if self._waited or not busy:
            self._returns.append(now - self._ended)

    def seconds(self, now: float, missing: int) -> float:
        """How much longer to wait, with `missing` open sequences not here; 0: not at all."""
        if not min(self._away, missing) or self._window > PAYS * self._step:
            return 0.0
        left = max(0.0, self._ended + self._window - now)
        self._waited |= left > 0
        return left
