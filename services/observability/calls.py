"""Gives each call a request id, and notifies observers from its first message to its status.

An observer's exceptions are logged and do not affect the call. This interceptor comes first, so that it sees calls that
others refuse, and their log lines carry the request id.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from tandem.rpc.request_context import REQUEST_ID, Request, Span, begin, new_id, valid_id
from tandem.services.wrapping import Stream, Unary, wrapped

log = logging.getLogger("tandem.rpc")

_PREFIX = "/tandem.v1."
_DETAILS = "grpc-status-details-bin"
_QUOTES = "INVALID_FIELD"  # messages with this reason quote the request
_CODES = {code.value[0]: code.name for code in grpc.StatusCode}


@dataclass(slots=True)
class Call:
    """One call. `method` is Service/Method; `code`, `reason` (of ErrorInfo) and `message` are set at its end.

    `message` never quotes the request, so it may be logged.
    """

    method: str
    metadata: dict[str, str]
    request_id: str
    started: float = field(default_factory=time.perf_counter)
    code: str = ""
    reason: str = ""
    message: str = ""
    span: Span | None = None

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started


class CallObserver:
    """Receives the events of every call of a Tandem service, on the event loop. The defaults do nothing."""

    def began(self, call: Call) -> None:
        """A call began; its request has not been read."""

    def received(self, call: Call, size: int) -> None:
        """A message of `size` bytes of protobuf payload was received."""

    def sent(self, call: Call, size: int) -> None:
        """A message of `size` bytes was sent. For a unary reply, this comes after `ended`."""

    def replied(self, call: Call, request: Any, reply: Any, seconds: float) -> None:
        """A reply was made, `seconds` after its request was read. All replies of a unary request share that request."""

    def ended(self, call: Call) -> None:
        """The call ended, with the status in `call`."""


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Notifies `observers`, which may be added until the server listens."""

    def __init__(self, observers: Sequence[CallObserver]) -> None:
        self._observers = observers

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        method = handler_call_details.method
        if not method.startswith(_PREFIX):
            return await continuation(handler_call_details)
        metadata = {key: value for key, value in handler_call_details.invocation_metadata or () if type(value) is str}
        given = metadata.get(REQUEST_ID)
        call = Call(method[len(_PREFIX) :], metadata, given if given and valid_id(given) else new_id())
        self._notify("began", call)
        begin(Request(call.request_id, call.span))  # gRPC gives every call a task of its own
        handler = await continuation(handler_call_details)
        return handler and self._observed(handler, call)

    def _observed(self, handler: grpc.RpcMethodHandler, call: Call) -> grpc.RpcMethodHandler:
        stream = self._stream_stream if handler.stream_stream else self._unary_stream
        return wrapped(
            handler,
            lambda method: self._unary(method, call),
            lambda method: stream(method, call),
            request_deserializer=handler.request_deserializer and self._sized(handler.request_deserializer, call),
            response_serializer=self._sizing(handler.response_serializer, call),
        )

    def _unary(self, method: Unary, call: Call) -> Unary:
        async def observed(request: Any, context: grpc.aio.ServicerContext) -> Any:
            with self._until_end(call, context):
                reply = await method(request, context)
                self._notify("replied", call, request, reply, call.seconds)
                return reply

        return observed

    def _unary_stream(self, method: Stream, call: Call) -> Stream:
        async def observed(request: Any, context: grpc.aio.ServicerContext) -> AsyncGenerator[Any, None]:
            with self._until_end(call, context):
                async with contextlib.aclosing(method(request, context)) as replies:
                    async for reply in replies:
                        self._notify("replied", call, request, reply, call.seconds)
                        yield reply

        return observed

    def _stream_stream(self, method: Stream, call: Call) -> Stream:
        """Pairs each reply with the oldest unanswered request."""

        async def observed(
            requests: AsyncIterator[Any], context: grpc.aio.ServicerContext
        ) -> AsyncGenerator[Any, None]:
            unanswered: deque[tuple[Any, float]] = deque()
            with self._until_end(call, context):
                async with contextlib.aclosing(method(_timed(requests, unanswered), context)) as replies:
                    async for reply in replies:
                        request, read = unanswered.popleft()
                        self._notify("replied", call, request, reply, time.perf_counter() - read)
                        yield reply

        return observed

    @contextlib.contextmanager
    def _until_end(self, call: Call, context: grpc.aio.ServicerContext) -> Any:
        if call.metadata.get(REQUEST_ID) != call.request_id:  # a caller that sent the id need not be told
            context.set_trailing_metadata(((REQUEST_ID, call.request_id),))
        try:
            yield
            call.code = "OK"
        except (asyncio.CancelledError, GeneratorExit):
            left = context.time_remaining()
            call.code = "DEADLINE_EXCEEDED" if left is not None and left <= 0 else "CANCELLED"
            raise
        except BaseException:
            call.code = _code(context)
            call.reason = _reason(context)
            call.message = "" if call.reason == _QUOTES else _text(context.details())
            raise
        finally:
            self._notify("ended", call)

    def _sized(self, deserializer: Callable[[bytes], Any], call: Call) -> Callable[[bytes], Any]:
        def deserialize(data: bytes) -> Any:
            self._notify("received", call, len(data))
            return deserializer(data)

        return deserialize

    def _sizing(self, serializer: Callable[[Any], bytes], call: Call) -> Callable[[Any], bytes]:
        def serialize(message: Any) -> bytes:
            data = serializer(message)
            self._notify("sent", call, len(data))
            return data

        return serialize

    def _notify(self, event: str, *arguments: Any) -> None:
        for observer in self._observers:
            try:
                getattr(observer, event)(*arguments)
            except Exception:
                log.exception("an observer failed")


async def _timed(requests: AsyncIterator[Any], unanswered: deque[tuple[Any, float]]) -> AsyncGenerator[Any, None]:
    async for request in requests:
        unanswered.append((request, time.perf_counter()))
        yield request


def _code(context: grpc.aio.ServicerContext) -> str:
    code = context.code()
    return code.name if isinstance(code, grpc.StatusCode) else _CODES.get(code, "UNKNOWN")


def _text(details: str | bytes | None) -> str:
    return details.decode(errors="replace") if isinstance(details, bytes) else details or ""


def _reason(context: grpc.aio.ServicerContext) -> str:
    """Returns ErrorInfo.reason of the status, or ""."""
    for key, value in context.trailing_metadata() or ():
        if key == _DETAILS:
            for detail in status_pb2.Status.FromString(value).details:
                info = error_details_pb2.ErrorInfo()
                if detail.Unpack(info):
                    return str(info.reason)
    return ""
