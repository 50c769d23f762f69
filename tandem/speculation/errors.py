"""Errors: TandemError, and argument errors that are also ValueErrors or TypeErrors."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

_LONGEST_QUOTED = 60


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


class TandemError(Exception):
    """A failed call or a wrong argument.

    `code`: gRPC status name. `retry_seconds`: when to retry, if known. `reason`: see docs/sessions.md, docs/python.md.
    `field`: the request's field at fault. `produced`: tokens committed before the failure, perhaps only the last ones.
    """

    def __init__(
        self,
        code: str,
        message: str,
        retry_seconds: float | None = None,
        reason: str = "",
        produced: tuple[int, ...] = (),
        request_id: str | None = None,
        field: str = "",
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message, self.retry_seconds = code, message, retry_seconds
        self.reason, self.produced, self.request_id, self.field = reason, produced, request_id, field

    @property
    def outcome(self) -> Outcome:
        return outcome_of(self.code)

    def __reduce__(self) -> tuple[Callable[..., TandemError], tuple[Any, ...], dict[str, Any]]:
        return type(self).__new__, (type(self), *self.args), dict(self.__dict__)


class InvalidField(TandemError, ValueError):
    """A field of a request, or an argument, is wrong: `fault` says how."""

    def __init__(self, field: str, fault: str, message: str = "") -> None:
        said = message or f"{field}: {fault}"
        super().__init__("INVALID_ARGUMENT", said, reason="INVALID_FIELD", field=field)
        self.args, self.fault = (said,), fault


class WrongType(InvalidField, TypeError):
    """An argument has the wrong type. `expected` includes the article."""

    def __init__(self, field: str, expected: str, given: object) -> None:
        quoted = repr(given)
        quoted = quoted if len(quoted) <= _LONGEST_QUOTED else f"{quoted[: _LONGEST_QUOTED - 3]}..."
        super().__init__(field, fault := f"must be {expected}, not {quoted}", f"{field} {fault}")


class NoSuchOption(InvalidField, TypeError):
    """A request has no option of this name."""

    def __init__(self, name: str, hint: str = "") -> None:
        super().__init__(name, "no such option", f"a request has no option {name}{hint}")


class TooLong(TandemError, ValueError):
    """Prompt and new tokens exceed the sequence length."""

    def __init__(self, message: str) -> None:
        super().__init__("OUT_OF_RANGE", message, reason="SEQUENCE_TOO_LONG")
        self.args = (message,)
