"""How long verifiers take to answer, learned from what they answered, and how long one is waited for. Pure."""

from __future__ import annotations

from tandem.rpc.endpoint_pool import RetryBudget

ROUND_MEMORY = 0.9
"""What one quicker round leaves of the slowest one: after 22 of them a tenth."""
OPENING_MEMORY = 0.5
LEAST_TOKENS = 64
"""An opening of fewer tokens counts as one of so many: most of its time is not the tokens'."""


class AnswerTimes:
    """Shared by the requests of a process: seconds of a slow round, and of opening a session, as of late."""

    def __init__(self) -> None:
        self.slow_round = 0.0
        self._seconds_per_token = 0.0

    def answered(self, seconds: float) -> None:
        """A round was answered `seconds` after it was sent."""
        self.slow_round = max(seconds, ROUND_MEMORY * self.slow_round)

    def opened(self, tokens: int, seconds: float) -> None:
        """A session was opened in `seconds`, for which `tokens` had to be processed."""
        per_token = seconds / max(tokens, LEAST_TOKENS)
        self._seconds_per_token = max(per_token, OPENING_MEMORY * self._seconds_per_token)

    def slow_opening(self, tokens: int) -> float:
        """Seconds that a session of `tokens` tokens may well take to open; 0.0 where none was opened yet."""
        return self._seconds_per_token * max(tokens, LEAST_TOKENS)


class Waits:
    """How long a request waits for a verifier where another could be asked.

    `silence`: seconds in which one may answer nothing at all; `stall`: those that one which is serving may take.
    Shares of the time until the request's deadline keep what is waited for in vain below a third of it.
    """

    def __init__(self, silence: float, stall: float, retry_budget: RetryBudget, times: AnswerTimes) -> None:
        self._silence, self._stall, self._retry_budget, self._times = silence, stall, retry_budget, times

    def silence(self) -> float:
        return self._retry_budget.before_another(self._silence, 0.2, 2 * self._times.slow_round)

    def round(self) -> float:
        return self._retry_budget.before_another(self._stall, 0.25, 4 * self._times.slow_round)

    def opening(self, tokens: int) -> float:
        return self._retry_budget.before_another(self._stall, 0.25, 2 * self._times.slow_opening(tokens))
