"""Decides when the rest of a prompt is processed sooner in place than by pages from elsewhere. Pure.

Pages from elsewhere may take SLOWER times as long as in place, because they take no step from the rows here.
"""

from __future__ import annotations

import math

SLOWER = 2.0
_MEMORY = 0.9
"""Factor by which each chunk fades those measured before it."""


class PrefillTimes:
    """Measures the time per prompt token processed here, waits for a step included; recent chunks count more."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """Records a chunk of `tokens` tokens."""
        self._tokens = _MEMORY * self._tokens + tokens
        self._seconds = _MEMORY * self._seconds + seconds

    @property
    def per_token(self) -> float | None:
        """Seconds per token; None before the first chunk."""
        return self._seconds / self._tokens if self._tokens else None


class Pace:
    """How long one transfer may still take until its next pages come.

    It counts from the first ones, which may have waited for a slot there. `in_place`: seconds per page in place; None:
    not known, so no pace is too slow. `spare`: seconds that the pages may be late in all.
    """

    def __init__(self, in_place: float | None, spare: float) -> None:
        self._in_place, self._spare = in_place, spare
        self._began: float | None = None
        self._since = self._most = 0

    def came(self, pages: int, now: float) -> None:
        """Records pages that came together."""
        if self._began is None:
            self._began = now
        else:
            self._since += pages
        self._most = max(self._most, pages)

    def left(self, now: float) -> float:
        """Returns for how many seconds from now to wait for the next pages, as many as ever came together."""
        if self._began is None or self._in_place is None:
            return math.inf
        allowed = self._spare + SLOWER * self._in_place * (self._since + self._most)
        return self._began + allowed - now
