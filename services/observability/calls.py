"""Each call from its first message to its status: it is given its request id, and observers are told.

Observers look on: what one raises is logged, and the call goes on. This interceptor stands first, so that it sees what
the others refuse, and what they log carries the id.
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

log = logging.getLogger("tandem.rpc")

_PREFIX = "/tandem.v1."
_DETAILS = "grpc-status-details-bin"
_QUOTES = "INVALID_FIELD"  # what such an error says quotes the request
_CODES = {code.value[0]: code.name for code in grpc.StatusCode}


@dataclass(slots=True)
class Call:
    """One call. `method` is Service/Method; `code`, `reason` (of ErrorInfo) and `message` are known at its end.

    `message` quotes nothing of the request, so it may be logged.
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
    """Is told of every call of a Tandem service, on the event loop. By default it ignores what it is told."""

    def began(self, call: Call) -> None:
        """Nothing was read yet."""

    def received(self, call: Call, size: int) -> None:
        """A message of `size` bytes of protobuf payload came."""

    def sent(self, call: Call, size: int) -> None:
        """One left; that of a single reply after `ended`."""

    def replied(self, call: Call, request: Any, reply: Any, seconds: float) -> None:
        """One reply, `seconds` after the request that it answers was read. A stream of replies has one request."""

    def ended(self, call: Call) -> None:
        """With the status in `call`."""


class CallInterceptor(grpc.aio.ServerInterceptor):
    """`observers` may grow until the server listens."""

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
        self._tell("began", call)
        begin(Request(call.request_id, call.span))  # gRPC gives every call a task of its own
        handler = await continuation(handler_call_details)
        return handler and self._followed(handler, call)

    def _followed(self, handler: grpc.RpcMethodHandler, call: Call) -> grpc.RpcMethodHandler:
        coders = {
            "request_deserializer": handler.request_deserializer and self._sized(handler.request_deserializer, call),
            "response_serializer": self._sizing(handler.response_serializer, call),
        }
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(self._unary(handler.unary_unary, call), **coders)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(self._replies(handler.unary_stream, call), **coders)
        if handler.stream_stream:
            return grpc.stream_stream_rpc_method_handler(self._dialogue(handler.stream_stream, call), **coders)
        return handler

    def _unary(self, method: Callable[..., Awaitable[Any]], call: Call) -> Callable[..., Awaitable[Any]]:
        async def followed(request: Any, context: grpc.aio.ServicerContext) -> Any:
            with self._to_its_end(call, context):
                reply = await method(request, context)
                self._tell("replied", call, request, reply, call.seconds)
                return reply

        return followed

    def _replies(
        self, method: Callable[..., AsyncGenerator[Any, None]], call: Call
    ) -> Callable[..., AsyncGenerator[Any, None]]:
        async def followed(request: Any, context: grpc.aio.ServicerContext) -> AsyncGenerator[Any, None]:
            with self._to_its_end(call, context):
                async with contextlib.aclosing(method(request, context)) as replies:
                    async for reply in replies:
                        self._tell("replied", call, request, reply, call.seconds)
                        yield reply

        return followed

    def _dialogue(
        self, method: Callable[..., AsyncGenerator[Any, None]], call: Call
    ) -> Callable[..., AsyncGenerator[Any, None]]:
        """Each reply answers the oldest request that was not answered yet."""

        async def followed(
            requests: AsyncIterator[Any], context: grpc.aio.ServicerContext
        ) -> AsyncGenerator[Any, None]:
            unanswered: deque[tuple[Any, float]] = deque()
            with self._to_its_end(call, context):
                async with contextlib.aclosing(method(_noted(requests, unanswered), context)) as replies:
                    async for reply in replies:
                        request, read = unanswered.popleft()
                        self._tell("replied", call, request, reply, time.perf_counter() - read)
                        yield reply

        return followed

    @contextlib.contextmanager
    def _to_its_end(self, call: Call, context: grpc.aio.ServicerContext) -> Any:
        if call.metadata.get(REQUEST_ID) != call.request_id:  # who made the id knows it
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
            self._tell("ended", call)

    def _sized(self, deserializer: Callable[[bytes], Any], call: Call) -> Callable[[bytes], Any]:
        def deserialize(data: bytes) -> Any:
            self._tell("received", call, len(data))
            return deserializer(data)

        return deserialize

    def _sizing(self, serializer: Callable[[Any], bytes], call: Call) -> Callable[[Any], bytes]:
        def serialize(message: Any) -> bytes:
            data = serializer(message)
            self._tell("sent", call, len(data))
            return data

        return serialize

    def _tell(self, what: str, *about: Any) -> None:
        for observer in self._observers:
            try:
                getattr(observer, what)(*about)
            except Exception:
                log.exception("an observer failed")


async def _noted(requests: AsyncIterator[Any], unanswered: deque[tuple[Any, float]]) -> AsyncGenerator[Any, None]:
    async for request in requests:
        unanswered.append((request, time.perf_counter()))
        yield request


def _code(context: grpc.aio.ServicerContext) -> str:
    code = context.code()
    return code.name if isinstance(code, grpc.StatusCode) else _CODES.get(code, "UNKNOWN")


def _text(details: str | bytes | None) -> str:
    return details.decode(errors="replace") if isinstance(details, bytes) else details or ""


def _reason(context: grpc.aio.ServicerContext) -> str:
    """ErrorInfo.reason of the status, where it has one."""
    for key, value in context.trailing_metadata() or ():
        if key == _DETAILS:
            for detail in status_pb2.Status.FromString(value).details:
                info = error_details_pb2.ErrorInfo()
                if detail.Unpack(info):
                    return str(info.reason)
    return ""
