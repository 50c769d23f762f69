"""One exception for everything a service refuses or a network breaks."""

from __future__ import annotations

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tandem.rpc.printable import printable
from tandem.v1 import generation_pb2


class TandemError(Exception):
    """A call failed. `code` is the gRPC status name; `retry_seconds` is set where the server says when to try again.

    `reason` is the server's word for it (docs/sessions.md lists them), if it sent one. `produced`: the tokens that a
    generation had committed before it failed; of very many, where only the status told, the last ones. `request_id`:
    what the server's log lines about the request carry, where it said so.
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
    """The exception for a failed call, with what the server sent about it, printable: it goes to logs and terminals."""
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
