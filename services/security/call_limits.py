"""Limits calls' number, request sizes, and times of receiving and reading, which gRPC does not."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from tandem.rpc.request_context import prefix_scope
from tandem.services.calls import Call, CallObserver
from tandem.services.observability.request_log import PromptLog
from tandem.services.security.callers import OPEN, AcceptedTokens, caller
from tandem.services.security.limits import ConcurrencyLimit, ServerLimits
from tandem.services.statuses import NotRead
from tandem.speculation.types import InvalidField

log = logging.getLogger("tandem.rpc")

_SMALL = 4 * 1024
_ROUND = 256 * 1024
METHOD_BYTES = {
    "GetModelInfo": _SMALL,
    "CloseSession": _SMALL,
    "Check": _SMALL,
    "Verify": _ROUND,
    "VerifyStream": _ROUND,
}
"""Largest request in bytes by method; others: the server's limit."""

_ORIGIN: ContextVar[str] = ContextVar("origin", default="")
Result = TypeVar("Result")


class MessageTimeout(Exception):
    """A message was not received or read in time."""


def origin() -> str:
    """Returns the caller for fair sharing: identity, else machine."""
    return caller() or _ORIGIN.get()


def fairness_key() -> tuple[str, str]:
    """Returns the key of waiting turns: the caller and the user it names."""
    return origin(), prefix_scope()


class TransportInterceptor(grpc.aio.ServerInterceptor):
    """Answers every call, malformed requests too; without an accepted token none is parsed (`tokens` None: all are)."""

    def __init__(
        self,
        limits: ServerLimits,
        observers: Sequence[CallObserver] = (),
        tokens: AcceptedTokens | None = None,
        log_prompts: bool = False,
    ) -> None:
        self.limits, self.observers, self.tokens = limits, observers, tokens
        self.prompts = (PromptLog(),) if log_prompts else ()
        self.calls = ConcurrencyLimit("calls", "yours", limits.max_calls_per_caller, limits.max_calls)
        self.probes = ConcurrencyLimit("calls", "yours", limits.max_probes_per_caller, limits.max_probes)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        return handler and AnsweredCall(self, handler, handler_call_details).handler()

    def count(self, call: Call) -> None:
        """Counts a call until its task ends. Raises LimitReached."""
        host = call.context.peer().rpartition(":")[0]  # of ipv4:HOST:PORT; all callers over a Unix socket are one
        _ORIGIN.set(host)
        calls, who = (self.probes, host) if call.path.startswith(OPEN) else (self.calls, origin())
        calls.begin(who)
        task = asyncio.current_task()
        assert task is not None, "a call is answered in a task"
        task.add_done_callback(lambda _: calls.end(who))


class AnsweredCall:
    def __init__(self, server: TransportInterceptor, handler: Any, details: grpc.HandlerCallDetails) -> None:
        self._server, self._handler = server, handler
        self._call = Call(details.method, details.invocation_metadata or (), server, bool(handler.stream_stream))

    def handler(self) -> grpc.RpcMethodHandler:
        if self._handler.unary_unary:
            return grpc.stream_unary_rpc_method_handler(self._answer, None, self._encode)
        decode = self._decode if self._handler.stream_stream else None
        return grpc.stream_stream_rpc_method_handler(self._answer, decode, self._encode)

    async def _answer(self, requests: Any, context: grpc.aio.ServicerContext) -> Any:
        inner, call = self._handler, self._call
        async with call.answered(context):
            self._server.count(call)
            if inner.unary_unary:
                return call.replied(await inner.unary_unary(await self._request(), context))
            if inner.stream_stream:
                return await self._write(inner.stream_stream(requests, context))
            return await self._write(inner.unary_stream(await self._request(), context))

    async def _request(self) -> Any:
        seconds = self._server.limits.message_seconds
        try:
            data = await within(seconds, self._call.context.read())
        except MessageTimeout:
            raise InvalidField("request", f"missing: it was not received within {seconds:g} s") from None
        if data is grpc.aio.EOF:
            raise InvalidField("request", "missing: the call ended without a message")
        return self._decode(data)

    def _decode(self, data: bytes) -> Any:
        most = METHOD_BYTES.get(self._call.path.rpartition("/")[2])
        if most is not None and len(data) > most:
            raise InvalidField("request", f"{len(data)} bytes exceed this method's limit of {most}")
        try:
            message = (self._handler.request_deserializer or bytes)(data)
        except DecodeError:
            self._call.received(None, len(data))
            raise
        return self._call.received(message, len(data))

    def _encode(self, reply: Any) -> bytes:
        data: bytes = (self._handler.response_serializer or bytes)(reply)
        self._call.sent(len(data))
        return data

    async def _write(self, answered: Any) -> None:
        if inspect.isawaitable(answered):  # a service that writes its replies itself
            return await answered
        seconds, call = self._server.limits.unread_seconds, self._call
        try:
            async with contextlib.aclosing(answered) as replies:
                async for reply in replies:
                    await within(seconds, call.context.write(call.replied(reply)))
        except MessageTimeout:
            log.info("%s: its replies were not read within %g s", call.path, seconds)
            raise NotRead(f"replies were not read within {seconds:g} s") from None
        except grpc.aio.InternalError as gone:  # the client has disconnected, which cancels the call
            raise asyncio.CancelledError from gone


async def within(seconds: float, work: Awaitable[Result]) -> Result:
    """Awaits `work`. Raises MessageTimeout. asyncio.wait_for needs a task for each wait before Python 3.12."""
    task: Any = asyncio.current_task()
    late = False

    def end() -> None:
        nonlocal late
        late = True
        task.cancel()

    timer = asyncio.get_running_loop().call_later(seconds, end)
    try:
        return await work
    except asyncio.CancelledError:
        if not late:
            raise
        if hasattr(task, "uncancel"):  # from Python 3.11 on
            task.uncancel()
        raise MessageTimeout from None
    finally:
        timer.cancel()
