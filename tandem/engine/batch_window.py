"""Decides how long a step waits for rows that are expected back soon. Times are arguments; no clock is read.

Sequences that draft elsewhere return for their next round shortly after their answer. Two steps in one save what a step
takes whatever its rows, so waiting pays if that is much and they return soon. Otherwise two sequences could alternate
forever, each in its own step, at half of the throughput that they might reach together.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from functools import partial

from tandem.speculation.estimate import Line

KEPT, FEW = 64, 8
SLACK = 2.0
"""The window in multiples of the median return time, because the last of several rows takes longer than most."""
PAYS = 0.75
"""The longest window worth waiting for, as a share of the time that sharing a step saves."""
TRIED = 0.3
"""The window while fewer than FEW returns are known, as a share of the step's own time."""


class BatchWindow:
    """Tracks the rows that the last round of a device answered, and how long such rows usually take to return.

    Only returns while the device is idle or waits for them are measured. During a step, a client that drafts may have
    to share cores with it.
    """

    def __init__(self) -> None:
        self._away = 0
        self._ended = self._step = self._window = 0.0
        self._waited = False
        self._returns: deque[float] = deque(maxlen=KEPT)
        self._times = defaultdict[object, Line](partial(Line, 0.0))  # seconds by rows, for each kind of step

    def answered(
        self, rows: int, now: float, seconds: float, kind: object = None, beside_prompts: bool = False
    ) -> None:
        """Records that a step of `rows` decoding rows ended at `now`. `seconds`: its time, that of chunks included."""
        self._away, self._ended, self._step, self._waited = rows, now, seconds, False
        if not beside_prompts:
            self._times[kind].note(rows, seconds)
        known = len(self._returns) >= FEW
        self._window = SLACK * statistics.median(self._returns) if known else TRIED * seconds

    def returned(self, now: float, busy: bool) -> None:
        """Records that a row came for its next round; `busy`: a step was running."""
        if not self._away:
            return
        self._away -= 1
        if self._waited or not busy:
            self._returns.append(now - self._ended)

    def seconds(self, now: float, missing: int, kind: object = None) -> float:
        """Returns how much longer a step of this kind waits for `missing` open sequences that have no row ready."""
        if not min(self._away, missing) or self._window > PAYS * self._step * self._times[kind].fixed_share:
            return 0.0
        left = max(0.0, self._ended + self._window - now)
        self._waited |= left > 0
        return left
