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
from tandem.services.wrapping import OURS, Stream, Unary, wrapped
from tandem.speculation.types import FinishReason

log = logging.getLogger("tandem.rpc")

_DETAILS = "grpc-status-details-bin"
DEADLINE_SLACK = 0.25
"""A call that is cancelled this many seconds before its deadline, or later, has exceeded it."""
_QUOTES = "INVALID_FIELD"  # messages with this reason quote the request
_CODES = {code.value[0]: code.name for code in grpc.StatusCode}


@dataclass(slots=True)
class Call:
    """One call to `service`, its full name. `method` is Service/Method. `in_run`: it is a stream that became a run.

    `code`, `reason` (of ErrorInfo) and `message` are set at its end. `message` never quotes the request, so it may
    be logged.
    """

    method: str
    metadata: dict[str, str]
    request_id: str
    service: str
    started: float = field(default_factory=time.perf_counter)
    code: str = ""
    reason: str = ""
    message: str = ""
    span: Span | None = None
    in_run: bool = False

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
        if not method.startswith(OURS):
            return await continuation(handler_call_details)
        metadata = {key: value for key, value in handler_call_details.invocation_metadata or () if type(value) is str}
        given = metadata.get(REQUEST_ID)
        request_id = given if given and valid_id(given) else new_id()
        service = method[1:].partition("/")[0]
        call = Call(method.rpartition(".")[2], metadata, request_id, service)
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
        """Pairs each reply with the oldest unanswered request, and each step of a run with the newest message."""

        async def observed(
            requests: AsyncIterator[Any], context: grpc.aio.ServicerContext
        ) -> AsyncGenerator[Any, None]:
            unanswered: deque[tuple[Any, float]] = deque()
            with self._until_end(call, context):
                async with contextlib.aclosing(method(_timed(requests, unanswered), context)) as replies:
                    async for reply in replies:
                        request, read = unanswered[-1] if _in_run(reply) else unanswered.popleft()
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
            call.code = _why_cancelled(call.seconds, context.time_remaining())
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
            try:
                message = deserializer(data)
                call.in_run = call.in_run or begins_run(message)
                return message
            finally:
                self._notify("received", call, len(data))

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


def end_of(reply: Any) -> dict[str, Any] | None:
    """Returns what the end of a generation says, from a reply to a Generate of ours or of VllmEngine; else None."""
    kind = reply.WhichOneof(reply.DESCRIPTOR.oneofs[0].name)
    if kind == "completion":
        done, stats = reply.completion, reply.completion.stats
        counts = {"rounds": stats.rounds, "drafted": stats.drafted, "accepted": stats.accepted}
        why, output = FinishReason(done.finish_reason).name.lower(), done.output_tokens
    elif kind == "complete":
        done = reply.complete
        counts = {"drafted": done.spec_draft_tokens, "accepted": done.spec_accepted_tokens}
        why, output = done.finish_reason, done.completion_tokens
    else:
        return None
    return {"finish_reason": why, "prompt_tokens": done.prompt_tokens, "output_tokens": output, **counts}


def begins_run(request: Any) -> bool:
    """Returns whether a request is a message of a run."""
    return "run_until" in request.DESCRIPTOR.fields_by_name and request.HasField("run_until")


def _why_cancelled(seconds: float, left: float | None) -> str:
    """Returns the status of a call that was cancelled after `seconds`, `left` seconds before its deadline.

    A caller whose deadline passes cancels the call, and that can arrive before the deadline that the server knows,
    which began when the request was read.
    """
    return "CANCELLED" if left is None or left > min(DEADLINE_SLACK, seconds / 3) else "DEADLINE_EXCEEDED"


def _in_run(reply: Any) -> bool:
    return bool(getattr(reply, "messages_read", 0))


async def _timed(requests: AsyncIterator[Any], unanswered: deque[tuple[Any, float]]) -> AsyncGenerator[Any, None]:
    async for request in requests:
        if begins_run(request):
            unanswered.clear()
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
