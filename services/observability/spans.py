"""Trace spans of calls, rounds, queueing and steps."""

from __future__ import annotations

import time
from typing import Any

import grpc

from tandem.rpc.request_context import Attributes
from tandem.rpc.tracing import Span, Tracing
from tandem.rpc.wire_sessions import drafted_in
from tandem.services.calls import Call, CallObserver

_NUMBERS = {code.name: code.value[0] for code in grpc.StatusCode}


class CallSpans(CallObserver):
    """Must be the first observer: the others run inside its span."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    def began(self, call: Call) -> None:
        service, _, method = call.path[1:].partition("/")
        about = {
            "rpc.system": "grpc",
            "rpc.service": service,
            "rpc.method": method,
            "tandem.request_id": call.request_id,
        }
        call.span = self._tracing.start(method, about, "server", call.metadata)

    def replied(self, call: Call, request: Any, reply: Any, seconds: float) -> None:
        if call.span is None:
            return
        method, now = call.method.rpartition("/")[2], time.time()
        if method == "Verify":
            _round(call.span, request, reply, now)
        elif method == "VerifyStream":
            in_run = reply.messages_read and not (reply.stale or reply.replayed)
            took = reply.queue_seconds + reply.compute_seconds if in_run else seconds
            span = call.span.child("Verify", {}, started=now - took)
            _round(span, request, reply, now)
            span.end(at=now)
        elif method == "CloseSession" and reply.steps:
            call.span.note({"run_steps": reply.steps, "committed_length": reply.committed_length})
        elif method == "OpenSession":
            call.span.note({"prefix_length": len(request.prefix), "reused_length": reply.reused_length})
            _step(call.span, "prefill", reply.queue_seconds, reply.prefill_seconds, {}, now)
        elif method == "Propose":
            about = {"rows": reply.step_rows, "drafted": len(reply.draft_tokens), "base_length": reply.base_length}
            _step(call.span, "propose", reply.queue_seconds, reply.compute_seconds, about, now)

    def ended(self, call: Call) -> None:
        if call.span:
            call.span.note({"rpc.grpc.status_code": _NUMBERS.get(call.code, 2)})
            call.span.note({name: call.done[name] for name in ("prompt_tokens", "output_tokens") if call.done})
            failed = call.code not in ("OK", "CANCELLED")
            call.span.end(f"{call.code}: {call.message}" if failed else "")


def _round(span: Span, request: Any, reply: Any, now: float) -> None:
    span.note(
        {
            "k": drafted_in(request, reply),
            "base_length": _base_length(request, reply),
            "accepted": reply.accepted,
            "stale": reply.stale,
            "replayed": reply.replayed,
        }
    )
    if not (reply.stale or reply.replayed):
        about = {"rows": reply.step_rows, "width": reply.step_width, "tokens": reply.step_tokens}
        _step(span, "verify", reply.queue_seconds, reply.compute_seconds, about, now)


def _base_length(request: Any, reply: Any) -> int:
    # A step extends the committed tokens, perhaps not its newest message.
    if reply.token_ids:
        return int(reply.committed_length - len(reply.token_ids))
    return int(request.base_length)


def _step(span: Span, kind: str, queued: float, computed: float, about: Attributes, now: float) -> None:
    span.child("queue", {}, started=now - computed - queued).end(at=now - computed)
    span.child("step", {"kind": kind, **about}, started=now - computed).end(at=now)
