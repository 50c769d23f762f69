"""Learns how long verifiers take to answer, and sets timeouts from it. Pure."""

from __future__ import annotations

from tandem.speculation.retry import RetryBudget

ROUND_MEMORY = 0.9
"""Decay of the slowest round per faster round; after 22 faster rounds a tenth remains."""
OPENING_MEMORY = 0.5
MIN_TOKENS = 64
"""Shorter openings count as this many tokens: their time is mostly fixed cost."""


class AnswerTimes:
    """Recent times of a slow round and of opening a session, in seconds; shared by the requests of a process."""

    def __init__(self) -> None:
        self.slow_round = 0.0
        self._seconds_per_token = 0.0

    def answered(self, seconds: float) -> None:
        """Records a round that took `seconds`."""
        self.slow_round = max(seconds, ROUND_MEMORY * self.slow_round)

    def opened(self, tokens: int, seconds: float) -> None:
        """Records a session that took `seconds` to open and processed `tokens` tokens."""
        per_token = seconds / max(tokens, MIN_TOKENS)
        self._seconds_per_token = max(per_token, OPENING_MEMORY * self._seconds_per_token)

    def slow_opening(self, tokens: int) -> float:
        """Returns the seconds that opening a session of `tokens` tokens may take; 0.0 before the first opening."""
        return self._seconds_per_token * max(tokens, MIN_TOKENS)


class Waits:
    """Timeouts of a request that could fail over to another verifier.

    `silence` limits a verifier that answers nothing, `stall` one that is serving but slow (both in seconds). A wait is
    also limited to a share of the time until the request's deadline, so that a failed one costs less than a third.
    """

    def __init__(self, silence: float, stall: float, retry_budget: RetryBudget, times: AnswerTimes) -> None:
        self._silence, self._stall, self._retry_budget, self._times = silence, stall, retry_budget, times

    def silence(self) -> float:
        return self._retry_budget.before_another(self._silence, 0.2, 2 * self._times.slow_round)

    def round(self) -> float:
        return self._retry_budget.before_another(self._stall, 0.25, 4 * self._times.slow_round)

    def opening(self, tokens: int) -> float:
        return self._retry_budget.before_another(self._stall, 0.25, 2 * self._times.slow_opening(tokens))
