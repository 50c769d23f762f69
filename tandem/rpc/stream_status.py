"""Keeps the status that a streaming call ended with.

If a message is written to a call that has just ended, grpc.aio (1.71 to 1.85, `_write` in grpc/aio/_call.py) replaces
the call's status by INTERNAL.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc

ENDED_MEANWHILE = ("INTERNAL", "Internal error from Core")
"""Code and message of the status that grpc.aio puts in place of the real one."""

Value = TypeVar("Value")


class StreamStatus:
    """The status of one grpc.aio call, kept when it arrives."""

    def __init__(self, call: Any) -> None:
        self._kept: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._keep)

    def error(self, raised: grpc.RpcError) -> grpc.RpcError:
        """Returns the error that the call really ended with, or `raised` if its status never arrived."""
        return self._kept or raised

    def _keep(self, call: Any) -> None:
        code, message = _result(call.code()), _result(call.details())
        if code not in (None, grpc.StatusCode.OK) and (code.name, message) != ENDED_MEANWHILE:
            initial, trailing = _result(call.initial_metadata()), _result(call.trailing_metadata())
            self._kept = grpc.aio.AioRpcError(code, initial, trailing, message)


def _result(coroutine: Coroutine[Any, Any, Value]) -> Value | None:
    """Returns what a coroutine that need not wait returns: a call that is done knows its status."""
    try:
        coroutine.send(None)
    except StopIteration as returned:
        value: Value = returned.value
        return value
    coroutine.close()
    return None
