"""Classifies failed calls by status code, for clients and servers."""

from __future__ import annotations

import enum


class Outcome(enum.Enum):
    """Why a call failed."""

    GONE = "the server ended, is ending, or cannot be reached"
    LATE = "no answer came in time"
    FORGOTTEN = "the server does not have the session: it expired, or the server was restarted"
    FULL = "the server has no room, and may have some later"
    UNFIT = "the server runs something else than the caller expects"
    REFUSED = "the request is at fault, wherever it is sent"
    DENIED = "the caller's credentials do not allow it"
    NOT_OFFERED = "the server does not have the method"
    FAULT = "the server made a mistake"


_OUTCOMES = {
    "UNAVAILABLE": Outcome.GONE,
    "CANCELLED": Outcome.GONE,
    "DEADLINE_EXCEEDED": Outcome.LATE,
    "NOT_FOUND": Outcome.FORGOTTEN,
    "RESOURCE_EXHAUSTED": Outcome.FULL,
    "FAILED_PRECONDITION": Outcome.UNFIT,
    "INVALID_ARGUMENT": Outcome.REFUSED,
    "OUT_OF_RANGE": Outcome.REFUSED,
    "ALREADY_EXISTS": Outcome.REFUSED,
    "ABORTED": Outcome.REFUSED,
    "UNAUTHENTICATED": Outcome.DENIED,
    "PERMISSION_DENIED": Outcome.DENIED,
    "UNIMPLEMENTED": Outcome.NOT_OFFERED,
}

SILENT = frozenset({Outcome.GONE, Outcome.LATE})  # no server answered: another gives the same tokens
LOST = SILENT | {Outcome.FORGOTTEN}  # reopening the session may help
REQUESTS_OWN = frozenset({Outcome.REFUSED, Outcome.FORGOTTEN, Outcome.FULL})  # concerns one request: the server is well
WORTH_REPEATING = SILENT | {Outcome.FULL, Outcome.FAULT}  # an idempotent call may succeed when repeated


def outcome_of(code: str) -> Outcome:
    return _OUTCOMES.get(code, Outcome.FAULT)
