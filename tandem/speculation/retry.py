"""Spaces retries and ends them. Pure: clock and chance are arguments."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

RETRY_SECONDS, ATTEMPTS = 60.0, 12  # of a request without progress; so many at least, if their waits fit
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0  # between its attempts
FIRST_SECONDS, LONGEST_SECONDS = 1.0, 30.0
FULL_SECONDS = 0.2  # wait for a full server that does not state one
MOST_PATIENT = 64  # longest wait for a server / first wait
MIN_WAIT = 0.3  # shortest wait before giving up on a server


def doubled(first: float, longest: float, times: int) -> float:
    return min(longest, first * 2.0 ** min(times, 30))


class RetryBudget:
    """One request's retries, for `retry_seconds` without progress, or `admission` seconds at full servers."""

    def __init__(
        self,
        retry_seconds: float = RETRY_SECONDS,
        deadline: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
        admission: float = 600.0,
    ) -> None:
        self._retry_seconds, self._clock, self._chance = retry_seconds, clock, chance
        self._deadline, self._admission = deadline, admission
        self._admission_ends = clock() + admission
        self._since: float | None = None
        self._end = 0.0  # of the request, early enough to report the error
        self._waited = 0.0
        self.attempts = self.failures = 0  # since the last progress, and of the whole request

    def progress(self) -> None:
        self._since, self.attempts = None, 0

    def opening(self) -> None:
        self._admission_ends = self._clock() + self._admission

    def full(self, seconds: float | None) -> float | None:
        """Returns the seconds before retrying a full server, by its hint `seconds`; None after admission."""
        self.progress()
        wait = self.limited(seconds or FULL_SECONDS)
        return None if self._clock() + wait > self._admission_ends else wait

    def wait(self) -> float | None:
        """Returns the seconds before the next attempt (0.0 before the first); None: give up."""
        now = self._clock()
        if self._since is None:
            self._since, self._waited, self._end = now, 0.0, math.inf
            if self._deadline is not None:
                self._end = self._deadline - min(0.2, 0.1 * max(0.0, self._deadline - now))
        pause = 0.0
        if self.attempts:
            longest = doubled(FIRST_PAUSE, LONGEST_PAUSE, self.attempts - 1)
            pause = longest * (0.5 + 0.5 * self._chance())  # clients of one lost server must not return together
        # Until enough attempts were made, only the waits between them count, not how long each took.
        spent = now - self._since if self.attempts >= ATTEMPTS else self._waited
        if spent + pause >= self._retry_seconds or now + pause >= self._end:
            return None
        self._waited += pause
        self.attempts += 1
        self.failures += 1
        return pause

    @property
    def seconds(self) -> float:
        return 0.0 if self._since is None else self._clock() - self._since

    @property
    def over(self) -> bool:
        """Whether the deadline has nearly passed: a failure then proves nothing about the server."""
        return self._deadline is not None and self._clock() >= self._deadline - 0.05

    def limited(self, seconds: float) -> float:
        """Limits a call's timeout to the deadline."""
        return seconds if self._deadline is None else max(0.001, min(seconds, self._deadline - self._clock()))

    def before_another(self, seconds: float, share: float) -> float:
        """Returns how long to wait for a server before another: at most `share` of the time left."""
        wait = doubled(seconds, MOST_PATIENT * seconds, self.failures)  # slow servers are not left over and over
        if self._deadline is None:
            return wait
        return max(MIN_WAIT, min(wait, share * (self._deadline - self._clock())))


class Backoff:
    """Spaces trials: waits double from `first` to `longest` seconds, and go on growing after a brief success."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        first: float = FIRST_SECONDS,
        longest: float = LONGEST_SECONDS,
    ) -> None:
        self._clock, self.first, self._longest = clock, first, longest
        self.wait_seconds = 0.0
        self._changed = -longest
        self._next_trial = 0.0
        self.up, self._trying = True, False

    @property
    def seconds(self) -> float:
        return self._clock() - self._changed

    def ready(self) -> bool:
        return self.up or self._clock() >= self._next_trial

    def due(self) -> bool:
        """Returns True to one caller per wait, which must make the trial."""
        if self.up or not self.ready():
            return False
        self._next_trial, self._trying = self._clock() + self.wait_seconds, True
        return True

    def given_up(self) -> None:
        """Ends a trial without outcome."""
        if self._trying:
            self._next_trial, self._trying = min(self._next_trial, self._clock() + self.first), False

    def refused(self) -> bool:
        """Like `failed`, where each call is a trial."""
        self._trying = not self.up
        return self.failed()

    def failed(self) -> bool:
        """Records a failure; returns whether the state changes. Earlier calls that fail later are ignored."""
        if not self.up and not self._trying:
            return False
        changed, again = self.up, self._trying or self.seconds < self._longest
        self._trying = False
        self.wait_seconds = min(2 * self.wait_seconds, self._longest) if again and self.wait_seconds else self.first
        if changed:
            self.up, self._changed = False, self._clock()
        self._next_trial = self._clock() + self.wait_seconds
        return changed

    def succeeded(self) -> float | None:
        """Records a success; returns the seconds of downtime, or None if it was up."""
        self._trying = False
        if self.up:
            return None
        down = self.seconds
        self.up, self._changed = True, self._clock()
        return down
