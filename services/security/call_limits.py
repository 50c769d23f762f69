"""Limits the number of calls, the size of requests and the time to receive requests and to read replies.

gRPC has no such limits: it keeps a call whose request never comes, or whose client never reads, until the connection
ends. TransportInterceptor comes before all others.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from tandem.services.errors import NotRead, abort
from tandem.services.security.identity import caller
from tandem.services.security.limits import Calls, LimitReached, ServerLimits
from tandem.services.wrapping import OURS, Refused
from tandem.speculation.types import InvalidField

log = logging.getLogger("tandem.rpc")

_HEALTH = "/grpc.health.v1.Health/"
_SMALL = 4 * 1024
_ROUND = 256 * 1024
METHOD_BYTES = {
    "GetModelInfo": _SMALL,
    "CloseSession": _SMALL,
    "EndProposals": _SMALL,
    "AddAdapter": _SMALL,
    "RemoveAdapter": _SMALL,
    "ListAdapters": _SMALL,
    "Check": _SMALL,
    "Watch": _SMALL,
    "Verify": _ROUND,
    "VerifyStream": _ROUND,
}
"""Largest request in bytes, by method; for other methods, only the server's own limit applies."""

_WRONG = (LimitReached, InvalidField, DecodeError)
_ORIGIN: ContextVar[str] = ContextVar("origin", default="")
Result = TypeVar("Result")


class MessageTimeout(Exception):
    """A call's message was not received or not read in time."""


def origin() -> str:
    """Returns the caller for fair sharing: its identity, or else the machine that it calls from."""
    return caller() or _ORIGIN.get()


def host_of(peer: str) -> str:
    """Returns the host of ipv4:HOST:PORT or ipv6:[HOST]:PORT; all callers over a Unix socket count as one."""
    return peer.rpartition(":")[0]


class TransportInterceptor(grpc.aio.ServerInterceptor):
    """Applies `limits` to every call; all other interceptors come after it.

    It reads unary requests itself, after the other interceptors have seen the call, so that a call without a token is
    not parsed, and one without a message is observed. Errors of the request are raised inside the other interceptors,
    so they get their status, log line and metrics like all others.
    """

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self.calls = Calls(limits.max_calls_per_caller, limits.max_calls)
        self.probes = {method: Calls(limits.max_probes_per_caller, limits.max_probes) for method in ("Check", "Watch")}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        return handler and _Call(self, handler, handler_call_details.method, self._limits).handler()

    def count(self, method: str, context: grpc.aio.ServicerContext) -> None:
        """Counts a call until its task ends. Raises LimitReached."""
        host = host_of(context.peer())
        _ORIGIN.set(host)
        health = method.startswith(_HEALTH)
        calls, who = (self.probes.get(method[len(_HEALTH) :], self.calls), host) if health else (self.calls, origin())
        calls.begin(who)
        task = asyncio.current_task()
        assert task is not None, "a call is answered in a task"
        task.add_done_callback(lambda _: calls.end(who))


class _Call:
    """One call, with the handler that gRPC gets."""

    def __init__(self, server: TransportInterceptor, handler: Any, method: str, limits: ServerLimits) -> None:
        self._server, self._handler, self._method, self._limits = server, handler, method, limits
        self._most = METHOD_BYTES.get(method.rpartition("/")[2])

    def handler(self) -> grpc.RpcMethodHandler:
        inner = self._handler
        if inner.unary_unary:
            return grpc.stream_unary_rpc_method_handler(self._unary, None, inner.response_serializer)
        if inner.unary_stream:
            return grpc.stream_stream_rpc_method_handler(self._replies, None, inner.response_serializer)
        reads = inner.request_deserializer and self._decode
        return grpc.stream_stream_rpc_method_handler(self._dialogue, reads, inner.response_serializer)

    async def _unary(self, requests: Any, context: grpc.aio.ServicerContext) -> Any:
        return await self._handler.unary_unary(await self._request(context), context)

    async def _replies(self, requests: Any, context: grpc.aio.ServicerContext) -> None:
        await self._write(self._handler.unary_stream(await self._request(context), context), context)

    async def _dialogue(self, requests: Any, context: grpc.aio.ServicerContext) -> None:
        try:
            self._server.count(self._method, context)
        except LimitReached as error:
            requests = _raising(await self._refused(error, context))
        await self._write(self._handler.stream_stream(requests, context), context)

    async def _request(self, context: grpc.aio.ServicerContext) -> Any:
        """Returns the call's only request, or Refused."""
        try:
            self._server.count(self._method, context)
            if self._handler.request_deserializer is None:
                return None  # already refused, so the request is not read
            with WaitLimit(self._limits.message_seconds) as waiting:
                data = await waiting.until(context.read())
            if data is grpc.aio.EOF:
                raise InvalidField("request", "missing: the call ended without a message")
            return self._decode(data)
        except MessageTimeout:
            seconds = self._limits.message_seconds
            return await self._refused(
                InvalidField("request", f"missing: it was not received within {seconds:g} s"), context
            )
        except _WRONG as error:
            return await self._refused(error, context)

    def _decode(self, data: bytes) -> Any:
        if self._most is not None and len(data) > self._most:
            raise InvalidField("request", f"{len(data)} bytes exceed this method's limit of {self._most}")
        return self._handler.request_deserializer(data)

    async def _refused(self, error: Exception, context: grpc.aio.ServicerContext) -> Refused:
        """Passes the error to the other interceptors. For other services, ends the call: nothing else would."""
        if not self._method.startswith(OURS):
            await abort(context, error)
        return Refused(error)

    async def _write(self, answered: Any, context: grpc.aio.ServicerContext) -> None:
        """Writes replies as they are read. Aborts the call if the client reads none for too long."""
        if inspect.isawaitable(answered):  # a service that writes its replies itself
            return await answered
        late: MessageTimeout | None = None
        async with contextlib.aclosing(answered) as replies:
            with WaitLimit(self._limits.unread_seconds) as waiting:
                try:
                    async for reply in replies:
                        await waiting.until(context.write(reply))
                except MessageTimeout as error:
                    late = error
                except grpc.aio.InternalError as gone:  # the client has disconnected, which cancels the call
                    raise asyncio.CancelledError from gone
        if late:
            log.info("%s: its replies were not read within %g s", self._method, self._limits.unread_seconds)
            await abort(context, NotRead(f"replies were not read within {self._limits.unread_seconds:g} s"))


class WaitLimit:
    """Limits the time of each wait of the current task, with one timer that is rarely reset."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._loop = seconds, asyncio.get_running_loop()
        self._task: Any = asyncio.current_task()
        self._since: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._late = False

    def __enter__(self) -> WaitLimit:
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer:
            self._timer.cancel()

    async def until(self, work: Awaitable[Result]) -> Result:
        """Awaits `work`. Raises MessageTimeout if it takes too long."""
        self._since = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._look)
        try:
            return await work
        except asyncio.CancelledError:
            if not self._late:
                raise
            if hasattr(self._task, "uncancel"):  # from Python 3.11 on
                self._task.uncancel()
            raise MessageTimeout from None
        finally:
            self._since = None

    def _look(self) -> None:
        self._timer = None
        if self._since is None:
            return
        left = self._since + self._seconds - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        else:
            self._late = True
            self._task.cancel()


async def _raising(refused: Refused) -> AsyncGenerator[Any, None]:
    raise refused.error
    yield
