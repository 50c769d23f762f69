"""Defines TandemError, the exception for every failed call, and builds it from a gRPC error."""

from __future__ import annotations

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tandem.rpc.printable import printable
from tandem.v1 import generation_pb2


class TandemError(Exception):
    """A failed call. `code` is the gRPC status name; `retry_seconds` is set if the server says when to retry.

    `reason` is the server's ErrorInfo reason, if it sent one (docs/sessions.md lists them). `produced` holds the tokens
    that a generation had committed before it failed; if they come from the status alone, only the last ones.
    `request_id` identifies the request in the server's log lines, if the server sent it.
    """

    def __init__(
        self,
        code: str,
        message: str,
        retry_seconds: float | None = None,
        reason: str = "",
        produced: tuple[int, ...] = (),
        request_id: str | None = None,
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message, self.retry_seconds = code, message, retry_seconds
        self.reason, self.produced, self.request_id = reason, produced, request_id


def from_rpc(error: grpc.RpcError) -> TandemError:
    """Builds the exception for a failed call. Its texts are made printable, since they go to logs and terminals."""
    found = TandemError(error.code().name, printable(error.details() or ""))
    status = rpc_status.from_call(error)
    for detail in status.details if status else ():
        retry, info = error_details_pb2.RetryInfo(), error_details_pb2.ErrorInfo()
        partial, request = generation_pb2.PartialGeneration(), error_details_pb2.RequestInfo()
        if detail.Unpack(retry):
            found.retry_seconds = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
        elif detail.Unpack(info):
            found.reason = printable(info.reason)
        elif detail.Unpack(partial):
            found.produced = tuple(partial.token_ids)
        elif detail.Unpack(request):
            found.request_id = printable(request.request_id)
    return found
