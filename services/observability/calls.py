"""Assigns request ids and notifies observers, whose errors are only logged. First layer: refused calls are seen too."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from google.rpc import code_pb2, error_details_pb2, status_pb2

from tandem.rpc.request_context import REQUEST_ID, Request, begin, current, new_id, valid_id
from tandem.services.layers import Call, Layer
from tandem.speculation.types import FinishReason

log = logging.getLogger("tandem.rpc")

DEADLINE_SLACK = 0.25  # seconds before a deadline at which a cancellation counts as exceeding it
_QUOTES = "INVALID_FIELD"  # messages with this reason quote the request


class CallObserver:
    """Receives the events of every Tandem call, on the event loop; defaults do nothing."""

    def began(self, call: Call) -> None:
        """A call began; its request is unread."""

    def received(self, call: Call, size: int) -> None:
        """A message of `size` bytes was received."""

    def sent(self, call: Call, size: int) -> None:
        """A message of `size` bytes was sent; if unary, after `ended`."""

    def replied(self, call: Call, request: Any, reply: Any, seconds: float) -> None:
        """A reply was made `seconds` after its request was read. Replies of a unary request share it."""

    def ended(self, call: Call) -> None:
        """The call ended with the status in `call`."""


class CallLayer(Layer):
    """Notifies `observers`; append before the server listens."""

    sees_messages = True

    def __init__(self, observers: Sequence[CallObserver]) -> None:
        self._observers = observers

    @contextlib.asynccontextmanager
    async def around(self, call: Call) -> AsyncIterator[None]:
        given = call.given(REQUEST_ID)[-1:]
        call.request_id = given[0] if given and valid_id(given[0]) else new_id()
        self._notify("began", call)
        begin(Request(call.request_id, call.span))  # gRPC gives every call a task of its own
        if given != [call.request_id]:  # a caller that sent the id need not be told
            call.context.set_trailing_metadata(((REQUEST_ID, call.request_id),))
        try:
            yield
            call.code = "OK"
        except (asyncio.CancelledError, GeneratorExit):
            call.code = _why_cancelled(call.seconds, call.context.time_remaining())
            raise
        except BaseException:
            status = call.status or status_pb2.Status(code=code_pb2.UNKNOWN)
            call.code, call.reason = code_pb2.Code.Name(status.code), _reason(status)
            call.message = "" if call.reason == _QUOTES else status.message
            raise
        finally:
            self._notify("ended", call)

    def received(self, call: Call, message: Any, size: int | None) -> None:
        if message is not None:
            if begins_run(message):
                call.in_run = True
                call.unanswered.clear()
            call.unanswered.append((message, time.perf_counter()))
        if size is not None:
            self._notify("received", call, size)

    def replied(self, call: Call, reply: Any) -> None:
        """Pairs a stream's reply with its oldest unanswered request; if it counts messages, with the newest."""
        answered = call.dialogue and not getattr(reply, "messages_read", 0)
        while not answered and len(call.unanswered) > 1:
            call.unanswered.popleft()
        request, read = call.unanswered.popleft() if answered else call.unanswered[-1]
        seconds = time.perf_counter() - read
        if call.method.endswith("/Generate") and reply.WhichOneof("event") == "completion":
            _add_end(call.done, reply.completion, request)
        for step in (reply, *getattr(reply, "next_steps", ())):
            self._notify("replied", call, request, step, seconds)

    def sent(self, call: Call, size: int) -> None:
        self._notify("sent", call, size)

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


def _reason(status: status_pb2.Status) -> str:
    info = error_details_pb2.ErrorInfo()
    return next((str(info.reason) for detail in status.details if detail.Unpack(info)), "")
