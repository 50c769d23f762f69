"""Keeps a stream's status: grpc.aio (1.71 to 1.85) makes it INTERNAL if a message is written after the end."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc

ENDED_MEANWHILE = ("INTERNAL", "Internal error from Core")  # grpc.aio's replacement

Value = TypeVar("Value")


class StreamStatus:
    def __init__(self, call: Any) -> None:
        self._kept: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._keep)

    def error(self, raised: grpc.RpcError) -> grpc.RpcError:
        return self._kept or raised

    def _keep(self, call: Any) -> None:
        code, message = _result(call.code()), _result(call.details())
        if code not in (None, grpc.StatusCode.OK) and (code.name, message) != ENDED_MEANWHILE:
            initial, trailing = _result(call.initial_metadata()), _result(call.trailing_metadata())
            self._kept = grpc.aio.AioRpcError(code, initial, trailing, message)


def _result(coroutine: Coroutine[Any, Any, Value]) -> Value | None:
    # A finished call's coroutine returns without waiting.
    try:
        coroutine.send(None)
    except StopIteration as returned:
        value: Value = returned.value
        return value
    coroutine.close()
    return None
