"""What a client sees of overload and of ends: the rows of the table in docs/openai.md, which tests make."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import openai

ERROR_EVENT = "error event, `[DONE]`"
GOES_ON = "goes on"


@dataclass(frozen=True)
class Row:
    """`answer`: what a request gets that has no answer yet; `code`: of its error, and of the event's."""

    event: str
    answer: str
    retry_after: str
    code: str
    stream: str
    slot: str

    def refused(self, error: openai.APIStatusError) -> None:
        """Checks what was told before an answer had begun."""
        told = (str(error.status_code), error.response.headers.get("retry-after", ""), error.code)
        assert told == (self.answer, self.retry_after, self.code)

    def broke(self, error: openai.APIError) -> None:
        """Checks the event with which a stream ended."""
        assert self.stream == ERROR_EVENT and not isinstance(error, openai.APIStatusError | openai.APIConnectionError)
        assert error.code == self.code and error.message


FULL = Row("`--queue` is full", "429", "1", "queue_full", GOES_ON, "none was taken")
LIMIT = Row("a limit of the caller is reached", "429", "1", "identity_limit", GOES_ON, "none was taken")
OTHERS = Row("another key fills slots and queue", "200", "", "", GOES_ON, "the next one that is freed")
CROWD = Row(
    "2048 connections are open, and no other host has more",
    "503",
    "1",
    "too_many_connections",
    GOES_ON,
    "none was taken",
)
DRAIN = Row("the server stops: new requests", "503", "1", "draining", "may finish", "none was taken")
CUT = Row("`--drain_seconds` are over", "503", "1", "draining", ERROR_EVENT, "freed at once")
OVER = Row("the server has ended", "connection refused", "", "", "", "")
KILLED = Row("a second signal; SIGKILL", "connection closed", "", "", "breaks off without `[DONE]`", "")
LEFT = Row("the client leaves; its `timeout` passes", "", "", "", "", "freed before the next step")
UNREAD = Row("the client reads nothing for 60 s", "", "", "", "connection closed", "freed at once")
LOST = Row("the device is lost; the server ends", "503", "1", "engine_lost", ERROR_EVENT, "")
HUNG = Row("a step hangs (`--step_seconds`)", "503", "1", "step_hung", ERROR_EVENT, "freed at once")

ROWS = (FULL, LIMIT, OTHERS, CROWD, DRAIN, CUT, OVER, KILLED, LEFT, UNREAD, LOST, HUNG)


def lines() -> list[str]:
    """The rows as the page has them."""
    return [f"| {' | '.join(cell or '-' for cell in astuple(row))} |" for row in ROWS]
