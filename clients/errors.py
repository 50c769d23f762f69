"""One exception for everything a service refuses or a network breaks."""

from __future__ import annotations

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status


class TandemError(Exception):
    """A call failed. `code` is the gRPC status name; `retry_seconds` is set where the server says when to try again."""

    def __init__(self, code: str, message: str, retry_seconds: float | None = None) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message, self.retry_seconds = code, message, retry_seconds


def from_rpc(error: grpc.RpcError) -> TandemError:
    """The exception for a failed call, with RetryInfo if the server sent it."""
    return TandemError(error.code().name, error.details() or "", _retry_seconds(error))


def _retry_seconds(error: grpc.RpcError) -> float | None:
    status = rpc_status.from_call(error)
    for detail in status.details if status else ():
        info = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            return info.retry_delay.seconds + info.retry_delay.nanos / 1e9
    return None
