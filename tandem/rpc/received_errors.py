"""Converts gRPC errors to TandemError."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import grpc
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from tandem.rpc.logs import printable
from tandem.speculation.errors import InvalidField
from tandem.speculation.errors import TandemError as TandemError
from tandem.v1 import generation_pb2

LEAST_RETRY_SECONDS = 0.01  # lower limit of a server's retry time


class BrokenContract(TandemError):
    def __init__(self, who: str, error: InvalidField) -> None:
        super().__init__("UNAVAILABLE", f"{who} broke the contract: {error}", reason="CONTRACT_BROKEN")


@contextlib.contextmanager
def contract(who: str) -> Iterator[None]:
    """Converts InvalidField to a BrokenContract of `who`."""
    try:
        yield
    except InvalidField as error:
        raise BrokenContract(who, error) from None


def from_rpc(error: grpc.RpcError) -> TandemError:
    found = TandemError(error.code().name, printable(error.details() or ""))
    with contextlib.suppress(ValueError, DecodeError):  # details of another status, or no messages
        if status := rpc_status.from_call(error):
            _add_details(found, status)
    return found


def from_status(status: status_pb2.Status) -> TandemError:
    found = TandemError(code_pb2.Code.Name(status.code), status.message)
    _add_details(found, status)
    return found


def _add_details(found: TandemError, status: status_pb2.Status) -> None:
    for detail in status.details:
        retry, info = error_details_pb2.RetryInfo(), error_details_pb2.ErrorInfo()
        bad = error_details_pb2.BadRequest()
        partial, request = generation_pb2.PartialGeneration(), error_details_pb2.RequestInfo()
        if detail.Unpack(retry):
            found.retry_seconds = max(LEAST_RETRY_SECONDS, retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9)
        elif detail.Unpack(info):
            found.reason = printable(info.reason)
        elif detail.Unpack(bad) and bad.field_violations:
            found.field = printable(bad.field_violations[0].field)
        elif detail.Unpack(partial):
            found.produced = tuple(partial.token_ids)
        elif detail.Unpack(request):
            found.request_id = printable(request.request_id)
