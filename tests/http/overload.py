"""Errors that a client of the door sees in overload and at ends, as docs/openai.md has them."""

from __future__ import annotations

from dataclasses import dataclass

import openai


@dataclass(frozen=True)
class Row:
    """An error's status and code: of a request without an answer yet, and of the event that ends a stream."""

    status: int
    code: str

    def refused(self, error: openai.APIStatusError) -> None:
        """Checks the error of a request without an answer yet."""
        found = (error.status_code, error.response.headers.get("retry-after"), error.code)
        assert found == (self.status, "1", self.code)

    def broke(self, error: openai.APIError) -> None:
        """Checks the event with which a stream ended."""
        assert not isinstance(error, openai.APIStatusError | openai.APIConnectionError)
        assert error.code == self.code and error.message


FULL = Row(429, "queue_full")
DRAIN, LOST, HUNG = Row(503, "draining"), Row(503, "engine_lost"), Row(503, "step_hung")
