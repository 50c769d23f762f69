"""HTTP errors in the form of OpenAI's API."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.any_pb2 import Any as Packed
from google.rpc import code_pb2, error_details_pb2, status_pb2

from tandem.speculation.errors import Outcome, outcome_of

RETRY_SECONDS = 1  # Retry-After, if the status has none
_BY_REASON = {
    "MODEL_NOT_FOUND": (404, "model_not_found"),
    "NO_SUCH_PATH": (404, "not_found"),
    "WRONG_METHOD": (405, "method_not_allowed"),
    "BODY_TOO_LARGE": (413, "body_too_large"),
    "BODY_LATE": (408, "body_late"),
    "NOT_JSON": (415, "not_json"),
    "SEQUENCE_TOO_LONG": (400, "context_length_exceeded"),
    "UNAUTHENTICATED": (401, "invalid_api_key"),
}
_BY_OUTCOME = {
    Outcome.GONE: 503,
    Outcome.LATE: 504,
    Outcome.FULL: 429,
    Outcome.REFUSED: 400,
    Outcome.DENIED: 401,
    Outcome.NOT_OFFERED: 501,
    Outcome.FAULT: 500,
}
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class NoSuchPath(Exception):
    """The server has no such path."""


class NoSuchModel(Exception):
    """The request names a model that is not loaded."""


class WrongMethod(Exception):
    """The path does not support this method."""


class NotJson(Exception):
    """The body is not plain JSON by its headers."""


class BodyTooLarge(Exception):
    """The body is larger than the server's limit."""

    def __init__(self, most: int) -> None:
        super().__init__(f"the body is larger than this server's limit of {most} bytes (max_message_bytes)")


class BodyLate(Exception):
    """The body did not arrive in time."""


@dataclass(frozen=True, slots=True)
class Refusal:
    status: int
    content: dict[str, Any]
    headers: tuple[tuple[str, str], ...] = ()


def refused(
    status: int, code: str | None, message: str, param: str | None = None, headers: Sequence[tuple[str, str]] = ()
) -> Refusal:
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    return Refusal(status, {"error": {"message": message, "type": kind, "param": param, "code": code}}, tuple(headers))


def refusal(status: status_pb2.Status) -> Refusal:
    """Converts a call's status, with its field and retry details."""
    reason, param, wait = "", None, None
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    detail: Packed
    for detail in status.details:
        if detail.Unpack(info):
            reason = info.reason
        elif detail.Unpack(bad) and bad.field_violations:
            param = bad.field_violations[0].field
        elif detail.Unpack(retry):
            wait = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    outcome = outcome_of(code_pb2.Code.Name(status.code))
    number, code = _BY_REASON.get(reason, (_BY_OUTCOME.get(outcome, 500), reason.lower() or None))
    headers = []
    if number in (429, 503):
        headers.append(("retry-after", str(max(RETRY_SECONDS, math.ceil(wait or 0)))))
    if number == 401:
        headers.append(("www-authenticate", "Bearer"))
    return refused(number, code, status.message, param, headers)
