"""One exception for everything a service refuses or a network breaks."""

from __future__ import annotations

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status


class TandemError(Exception):
    """A call failed. `code` is the gRPC status name; `retry_seconds` is set where the server says when to try again.

    `request_id`: what the server's log lines about the request carry, where it said so.
    """

    def __init__(
        self, code: str, message: str, retry_seconds: float | None = None, request_id: str | None = None
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message, self.retry_seconds, self.request_id = code, message, retry_seconds, request_id


def from_rpc(error: grpc.RpcError) -> TandemError:
    """The exception for a failed call, with what RetryInfo and RequestInfo say if the server sent them."""
    status = rpc_status.from_call(error)
    retry_seconds = request_id = None
    for detail in status.details if status else ():
        retry, request = error_details_pb2.RetryInfo(), error_details_pb2.RequestInfo()
        if detail.Unpack(retry):
            retry_seconds = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
        elif detail.Unpack(request):
            request_id = request.request_id
    return TandemError(error.code().name, error.details() or "", retry_seconds, request_id)
