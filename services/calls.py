"""Follows each call from its headers to its status: request id, caller, errors, observers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from tandem.rpc.received_errors import from_status
from tandem.rpc.request_context import REQUEST_ID, RequestContext, begin, current, new_id, valid_id
from tandem.rpc.tracing import Span
from tandem.services.security.callers import OPEN, identify
from tandem.services.statuses import to_status
from tandem.speculation.types import FinishReason

if TYPE_CHECKING:
    from tandem.services.security.call_limits import TransportInterceptor

log = logging.getLogger("tandem.rpc")

Context: TypeAlias = grpc.aio.ServicerContext
OURS = "/tandem.v1."  # prefix of observed methods
DEADLINE_SLACK = 0.25  # seconds before a deadline at which a cancellation counts as exceeding it
_GRPC_FAILED = (grpc.aio.InternalError, grpc.aio.UsageError)
_QUOTES = "INVALID_FIELD"  # messages with this reason quote the request


class CallObserver:
    """Receives the events of every Tandem call, on the event loop; its errors are only logged."""

    def began(self, call: Call) -> None:
        """A call began; its request is unread."""

    def received(self, call: Call, message: Any, size: int | None) -> None:
        """A message of `size` bytes (None: unknown) was received; `message` None: not parsed."""

    def replied(self, call: Call, request: Any, reply: Any, seconds: float) -> None:
        """A reply was made `seconds` after its request was read. Replies of a unary request share it."""

    def sent(self, call: Call, size: int) -> None:
        """A message of `size` bytes was sent; if unary, after `ended`."""

    def ended(self, call: Call) -> None:
        """The call ended with the status in `call`."""


@dataclass(slots=True, eq=False)
class Call:
    """One call of `path` (/PACKAGE.SERVICE/METHOD). `message` never quotes the request: it may be logged.

    `dialogue`: requests stream. `unanswered`: requests and read times. `done`: how its generations ended.
    """

    path: str
    metadata: Sequence[tuple[str, str | bytes]]
    server: TransportInterceptor
    dialogue: bool = False
    request_id: str = ""
    started: float = field(default_factory=time.perf_counter)
    status: status_pb2.Status | None = None  # of a call that failed
    code: str = ""
    reason: str = ""
    message: str = ""
    span: Span | None = None
    done: dict[str, Any] = field(default_factory=dict)
    unanswered: deque[tuple[Any, float]] = field(default_factory=deque)
    context: Context = field(init=False)
    method: str = field(init=False)  # as in TargetVerifier/Verify
    _observers: Sequence[CallObserver] = ()

    def __post_init__(self) -> None:
        self.method = self.path.rpartition(".")[2]
        if self.path.startswith(OURS):
            self._observers = (*self.server.observers, *self.server.prompts)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def given(self, key: str) -> list[str]:
        return [value for name, value in self.metadata if name == key and isinstance(value, str)]

    @contextlib.asynccontextmanager
    async def answered(self, context: Context) -> AsyncIterator[None]:
        """Runs the block, from before the request is read until the last reply is made; ends a call that fails."""
        self.context = context
        if self.path.startswith(OURS):
            self._begin()
        try:
            if not self.path.startswith(OPEN):
                identify(self.server.tokens, self)
            yield
            self.code = "OK"
        except (asyncio.CancelledError, GeneratorExit):
            self._cancelled()
            raise
        except grpc.aio.AbortError:
            self.code = "UNKNOWN"
            raise
        except Exception as error:
            if isinstance(error, grpc.aio.BaseError) and not isinstance(error, _GRPC_FAILED):
                self._cancelled()  # the server has stopped
                raise
            await self._fail(error)
        finally:
            self._notify("ended", self)

    def _begin(self) -> None:
        given = self.given(REQUEST_ID)[-1:]
        self.request_id = given[0] if given and valid_id(given[0]) else new_id()
        self._notify("began", self)
        begin(RequestContext(self.request_id, self.span))  # gRPC gives every call a task of its own
        if given != [self.request_id]:  # a caller that sent the id knows it
            self.context.set_trailing_metadata(((REQUEST_ID, self.request_id),))

    async def _fail(self, error: Exception) -> None:
        self.status = status = to_status(error, bool(self.server.prompts))
        found = from_status(status)
        self.code, self.reason = found.code, found.reason
        self.message = "" if self.reason == _QUOTES else status.message
        if request := current():
            status.details.add().Pack(error_details_pb2.RequestInfo(request_id=request.id))
        try:
            await self.context.abort_with_status(rpc_status.to_status(status))
        except grpc.aio.InternalError as gone:  # the caller has disconnected, which cancels the call
            self._cancelled()
            raise asyncio.CancelledError from gone

    def _cancelled(self) -> None:
        self.code, self.reason, self.message = _why_cancelled(self.seconds, self.context.time_remaining()), "", ""

    def received(self, message: Any, size: int | None = None) -> Any:
        if message is not None and self._observers:
            if begins_run(message):
                self.unanswered.clear()
            self.unanswered.append((message, time.perf_counter()))
        self._notify("received", self, message, size)
        return message

    def replied(self, reply: Any) -> Any:
        """Pairs a stream's reply with its oldest unanswered request; if it counts messages, with the newest."""
        if not self._observers:
            return reply
        answered = self.dialogue and not getattr(reply, "messages_read", 0)
        while not answered and len(self.unanswered) > 1:
            self.unanswered.popleft()
        request, read = self.unanswered.popleft() if answered else self.unanswered[-1]
        seconds = time.perf_counter() - read
        if self.method.endswith("/Generate") and reply.WhichOneof("event") == "completion":
            _add_end(self.done, reply.completion, request)
        for step in (reply, *(getattr(reply, "next_steps", ()) if self.dialogue else ())):
            self._notify("replied", self, request, step, seconds)
        return reply

    def sent(self, size: int) -> None:
        self._notify("sent", self, size)

    def _notify(self, event: str, *arguments: Any) -> None:
        for observer in self._observers:
            try:
                getattr(observer, event)(*arguments)
            except Exception:
                log.exception("an observer failed")


def _add_end(done: dict[str, Any], completion: Any, request: Any) -> None:
    """Adds how a generation ended. Choices of one request share its prompt."""
    stats = completion.stats
    counts = {"output_tokens": completion.output_tokens}
    counts |= {name: getattr(stats, name) for name in ("rounds", "drafted", "accepted")}
    if done:
        done |= {name: done[name] + count for name, count in counts.items()}
        return
    done |= {"finish_reason": FinishReason(completion.finish_reason).name.lower()}
    done |= {"prompt_tokens": completion.prompt_tokens, **counts}
    has_adapter = "generation" in request.DESCRIPTOR.fields_by_name  # over HTTP the context has it
    context = current()
    adapter = request.generation.adapter if has_adapter else context.adapter if context else ""
    done |= {"adapter": adapter} if adapter else {}


def begins_run(request: Any) -> bool:
    return "run_until" in request.DESCRIPTOR.fields_by_name and request.HasField("run_until")


def _why_cancelled(seconds: float, left: float | None) -> str:
    # The client's own deadline can cancel before the server's, which began later.
    return "CANCELLED" if left is None or left > min(DEADLINE_SLACK, seconds / 3) else "DEADLINE_EXCEEDED"
