"""Maps domain errors to gRPC statuses."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence
from typing import Any

from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2

from tandem.engine.batcher import DeviceLost, StepHung
from tandem.engine.fair_turns import TooManyWaiting
from tandem.engine.slots import NoFreeSlot
from tandem.rpc.logs import printable
from tandem.rpc.received_errors import TandemError
from tandem.runners.protocol import RowFailed
from tandem.services.http.refusals import HttpError
from tandem.services.security.limits import LimitReached
from tandem.services.server_duplex import StreamIdle
from tandem.services.sessions.table import SessionConflict, SessionExpired, SessionNotFound
from tandem.speculation.errors import Outcome, outcome_of
from tandem.speculation.rounds import OutOfStep
from tandem.speculation.types import InvalidField, TooLong
from tandem.v1 import generation_pb2

log = logging.getLogger("tandem.rpc")

DOMAIN = "tandem.v1"
RETRY_SECONDS = 0.1
MAX_REASON = 64  # bytes
MAX_PARTIAL = 1024  # token ids in a status: trailing metadata must stay below 8 KiB


class Unauthenticated(PermissionError):
    """The caller presents no valid credentials."""


class VocabularyMismatch(ValueError):
    """Draft and target have different vocabularies."""


class ModelMismatch(ValueError):
    """The client expects a different target model."""


class QueueFull(NoFreeSlot):
    """The queue of waiting requests is full."""


class Interrupted(Exception):
    """A generation failed midway because of `cause`, after the tokens `produced` were sent."""

    def __init__(self, cause: Exception, produced: tuple[int, ...]) -> None:
        super().__init__(str(cause))
        self.cause, self.produced = cause, produced


class NotAccepting(RuntimeError):
    """The server is draining and takes no new work."""


class NotRead(RuntimeError):
    """The caller did not read its replies in time."""


class NotOffered(RuntimeError):
    """This server was started without the components that the method needs."""


# (exception, status code, reason)
_TABLE: tuple[tuple[type[Exception], int, str], ...] = (
    (Unauthenticated, code_pb2.UNAUTHENTICATED, "UNAUTHENTICATED"),
    (InvalidField, code_pb2.INVALID_ARGUMENT, "INVALID_FIELD"),
    (DecodeError, code_pb2.INVALID_ARGUMENT, "NOT_A_MESSAGE"),
    (TooLong, code_pb2.OUT_OF_RANGE, "SEQUENCE_TOO_LONG"),
    (QueueFull, code_pb2.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    (TooManyWaiting, code_pb2.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    (NoFreeSlot, code_pb2.RESOURCE_EXHAUSTED, "NO_SLOT"),
    (LimitReached, code_pb2.RESOURCE_EXHAUSTED, "IDENTITY_LIMIT"),
    (SessionExpired, code_pb2.NOT_FOUND, "SESSION_EXPIRED"),
    (SessionNotFound, code_pb2.NOT_FOUND, "SESSION_NOT_FOUND"),
    (SessionConflict, code_pb2.ALREADY_EXISTS, "SESSION_CONFLICT"),
    (ModelMismatch, code_pb2.FAILED_PRECONDITION, "MODEL_MISMATCH"),
    (VocabularyMismatch, code_pb2.FAILED_PRECONDITION, "TOKENIZER_MISMATCH"),
    (NotOffered, code_pb2.UNIMPLEMENTED, "NOT_OFFERED"),
    (NotAccepting, code_pb2.UNAVAILABLE, "DRAINING"),
    (NotRead, code_pb2.DEADLINE_EXCEEDED, "NOT_READ"),
    (StreamIdle, code_pb2.NOT_FOUND, "STREAM_IDLE"),
    (OutOfStep, code_pb2.ABORTED, "OUT_OF_STEP"),
    (RowFailed, code_pb2.INTERNAL, "ROW_FAILED"),
    (StepHung, code_pb2.UNAVAILABLE, "STEP_HUNG"),
    (DeviceLost, code_pb2.UNAVAILABLE, "ENGINE_LOST"),
)


def to_status(error: Exception, log_prompts: bool = False) -> status_pb2.Status:
    """Builds a status with ErrorInfo and, where they apply, BadRequest, RetryInfo or PartialGeneration."""
    if isinstance(error, Interrupted):
        status = to_status(error.cause, log_prompts)
        produced, tokens = error.produced[-MAX_PARTIAL:], len(error.produced)
        status.details.add().Pack(generation_pb2.PartialGeneration(output_tokens=tokens, token_ids=produced))
        return status
    own = isinstance(error, InvalidField | TooLong)
    if isinstance(error, TandemError) and not own and error.outcome is Outcome.DENIED:  # our credentials are at fault
        return _status(code_pb2.INTERNAL, f"another server refused this server's call: {error}")
    if isinstance(error, TandemError) and not own:  # from another server, passed on
        details = [_info(error.reason)] if error.reason else []
        details += [_violation(error.field, error.message)] if error.field else []
        details += [_retry(error.retry_seconds)] if error.retry_seconds else []
        return _status(code_pb2.Code.Value(error.code), error.message, details)
    if isinstance(error, HttpError):
        details = [_info(error.reason)] + ([_violation(error.param, str(error))] if error.param else [])
        return _status(error.code, str(error), details)
    for kind, code, reason in _TABLE:
        if isinstance(error, kind):
            return _status(code, str(error), _details(error, code, reason))
    if log_prompts:
        log.error("unexpected error", exc_info=error)
    else:  # its message may quote the request
        log.error("unexpected error: %s at %s", type(error).__name__, _places(error))
    return _status(code_pb2.INTERNAL, f"internal error: {type(error).__name__}")


def _status(code: int, message: str, details: Sequence[Any] = ()) -> status_pb2.Status:
    status = status_pb2.Status(code=code, message=printable(message))
    for detail in details:
        status.details.add().Pack(detail)
    return status


def _places(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return ", ".join(f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames)


def _info(reason: str) -> Any:
    return error_details_pb2.ErrorInfo(reason=printable(reason, MAX_REASON), domain=DOMAIN)


def _details(error: Exception, code: int, reason: str) -> list[Any]:
    messages: list[Any] = [_info(reason)]
    if isinstance(error, InvalidField):
        messages.append(_violation(error.field, str(error)))
    if outcome_of(code_pb2.Code.Name(code)) is Outcome.FULL:
        messages.append(_retry(RETRY_SECONDS))
    return messages


def _violation(field: str, description: str) -> error_details_pb2.BadRequest:
    violation = error_details_pb2.BadRequest.FieldViolation(field=printable(field), description=printable(description))
    return error_details_pb2.BadRequest(field_violations=[violation])


def _retry(seconds: float) -> error_details_pb2.RetryInfo:
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(int(seconds * 1000))
    return retry
