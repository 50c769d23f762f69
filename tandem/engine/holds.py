"""Bounds how long a request that waits for memory holds back later requests. Pure; times are arguments, in seconds.

A hold lasts FIRST seconds, and twice as long each time for the same one, up to LONGEST. After it nobody is held back
for REST times as long. So at most a quarter of the time goes to holds, whoever waits, how often, and by whatever name;
and who waits gets its turn once a hold is as long as those who passed it stay.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST, LONGEST = 1.0, 32.0
REST = 3.0


@dataclass(slots=True)
class Holds:
    """The holds of one queue, one at a time. `until`: when the current or last one ends."""

    until: float = 0.0
    _who: object = None
    _began: float = 0.0
    _length: float = 0.0
    _rests_until: float = 0.0

    def begins(self, who: object, now: float) -> bool:
        """Begins a hold for `who`, unless one is on or has just been; returns whether it did."""
        if now < max(self.until, self._rests_until):
            return False
        self._length = min(2 * self._length, LONGEST) if who is self._who else FIRST
        self._who, self._began, self.until = who, now, now + self._length
        self._rests_until = self.until + REST * self._length
        return True

    def on(self, now: float) -> bool:
        """Returns whether a hold is on."""
        return now < self.until

    def over(self, who: object, now: float) -> None:
        """Ends the hold for `who`, which no longer waits."""
        if who is self._who and now < self.until:
            self.until, self._rests_until = now, now + REST * (now - self._began)
