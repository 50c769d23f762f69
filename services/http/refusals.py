"""HTTP errors in the form of OpenAI's API."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from google.rpc import code_pb2, status_pb2

from tandem.rpc.received_errors import from_status
from tandem.speculation.errors import Outcome

RETRY_SECONDS = 1  # Retry-After, if the status has none
REASONS = {
    "MODEL_NOT_FOUND": (code_pb2.NOT_FOUND, 404, "model_not_found"),
    "NO_SUCH_PATH": (code_pb2.NOT_FOUND, 404, "not_found"),
    "WRONG_METHOD": (code_pb2.UNIMPLEMENTED, 405, "method_not_allowed"),
    "BODY_TOO_LARGE": (code_pb2.OUT_OF_RANGE, 413, "body_too_large"),
    "BODY_LATE": (code_pb2.DEADLINE_EXCEEDED, 408, "body_late"),
    "NOT_JSON": (code_pb2.INVALID_ARGUMENT, 415, "not_json"),
    "SEQUENCE_TOO_LONG": (code_pb2.OUT_OF_RANGE, 400, "context_length_exceeded"),
    "UNAUTHENTICATED": (code_pb2.UNAUTHENTICATED, 401, "invalid_api_key"),
}
"""Code of gRPC, status of HTTP, code in OpenAI's API."""
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


class HttpError(Exception):
    """A refusal that only HTTP has: one of REASONS, and the field at fault."""

    def __init__(self, reason: str, message: str, param: str = "") -> None:
        super().__init__(message)
        self.code, self.reason, self.param = REASONS[reason][0], reason, param


def refused(status: int, code: str | None, message: str, param: str | None = None) -> dict[str, Any]:
    """The body of an error."""
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refusal(
    status: status_pb2.Status, names: Mapping[str, str]
) -> tuple[int, dict[str, Any], Sequence[tuple[str, str]]]:
    """Converts a failed call's status to HTTP's status, body and headers. `names`: HTTP's names of fields."""
    found = from_status(status)
    reason, param, message = found.reason, found.field, found.message
    if param in names:
        message = names[param] + message.removeprefix(param)
        param = names[param]
    elif reason == "SEQUENCE_TOO_LONG" and not param:
        param = "max_tokens" if "max_new_tokens" in message else names.get("prompt", "")
        message = message.replace("max_new_tokens", "max_tokens")
    _, number, code = REASONS.get(reason, (0, _BY_OUTCOME.get(found.outcome, 500), reason.lower() or None))
    headers = []
    if number in (429, 503):
        headers.append(("retry-after", str(max(RETRY_SECONDS, math.ceil(found.retry_seconds or 0)))))
    if number == 401:
        headers.append(("www-authenticate", "Bearer"))
    return number, refused(number, code, message, param or None), headers
