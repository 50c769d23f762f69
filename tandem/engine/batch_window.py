"""Decides how long a step waits for rows that are expected back soon, because two steps in one save fixed time."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from functools import partial

from tandem.speculation.estimate import Line

KEPT, FEW = 64, 8
SLACK = 2.0  # window in median return times, because the last of several rows takes longer
PAYS = 0.75  # longest window, as a share of the time that sharing a step saves
TRIED = 0.3  # window in step times while fewer than FEW returns are known


class BatchWindow:
    """Tracks a device's last round and usual return times, measured while it is idle or waits."""

    def __init__(self) -> None:
        self._away = 0
        self._ended = self._step = self._window = 0.0
        self._waited = False
        self._returns: deque[float] = deque(maxlen=KEPT)
        self._times = defaultdict[object, Line](partial(Line, 0.0))  # seconds by rows, for each kind of step

    def answered(
        self, rows: int, now: float, seconds: float, kind: object = None, beside_prompts: bool = False
    ) -> None:
        """Records the end of a step of `rows` decoding rows. `seconds`: its time, chunks included."""
        self._away, self._ended, self._step, self._waited = rows, now, seconds, False
        if not beside_prompts:
            self._times[kind].note(rows, seconds)
        known = len(self._returns) >= FEW
        self._window = SLACK * statistics.median(self._returns) if known else TRIED * seconds

    def returned(self, now: float, busy: bool) -> None:
        """Records a row's return; `busy`: during a step."""
        if not self._away:
            return
        self._away -= 1
        if self._waited or not busy:
            self._returns.append(now - self._ended)

    def seconds(self, now: float, missing: int, kind: object = None) -> float:
        """How much longer a step of this kind waits for `missing` open sequences."""
        if not min(self._away, missing) or self._window > PAYS * self._step * self._times[kind].fixed_share:
            return 0.0
        left = max(0.0, self._ended + self._window - now)
        self._waited |= left > 0
        return left
