"""Errors: TandemError, and argument errors that are also ValueErrors or TypeErrors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tandem.speculation.outcomes import Outcome, outcome_of

_LONGEST_QUOTED = 60


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
