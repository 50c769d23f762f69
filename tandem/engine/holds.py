"""Bounds how long a request that waits for memory holds back later ones: at most a quarter of the time."""

from __future__ import annotations

from dataclasses import dataclass

FIRST, LONGEST = 1.0, 32.0
REST = 3.0


@dataclass(slots=True)
class Holds:
    """One hold at a time. `until`: end of the current or last one."""

    until: float = 0.0
    _who: object = None
    _began: float = 0.0
    _length: float = 0.0
    _rests_until: float = 0.0

    def begins(self, who: object, now: float) -> bool:
        """Begins a hold for `who`, unless one is on or ended recently; returns whether it did."""
        if now < max(self.until, self._rests_until):
            return False
        self._length = min(2 * self._length, LONGEST) if who is self._who else FIRST
        self._who, self._began, self.until = who, now, now + self._length
        self._rests_until = self.until + REST * self._length
        return True

    def on(self, now: float) -> bool:
        return now < self.until

    def over(self, who: object, now: float) -> None:
        if who is self._who and now < self.until:
            self.until, self._rests_until = now, now + REST * (now - self._began)
