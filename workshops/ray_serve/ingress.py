"""Registers Tandem's methods on Ray Serve's gRPC proxy, so that Tandem clients can call it like a Tandem server.

Serve routes calls by metadata: `application` names the application, and calls with the same `session_id` go to the same
replica. Tandem clients send neither. The handlers registered here (`gRPCOptions.grpc_servicer_functions`) derive both
from the service and the request, so clients need no change.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from functools import partial
from typing import Any
from urllib.parse import unquote

import grpc

from tandem.rpc.channel import DRAFT, FUSED, PREFILL, TARGET
from tandem.rpc.credentials import on_this_machine
from tandem.v1.draft_worker_pb2_grpc import add_DraftWorkerServicer_to_server
from tandem.v1.fused_speculative_server_pb2_grpc import add_FusedSpeculativeServerServicer_to_server
from tandem.v1.prefill_worker_pb2_grpc import add_PrefillWorkerServicer_to_server
from tandem.v1.target_verifier_pb2_grpc import add_TargetVerifierServicer_to_server

STATUS_DETAILS = "grpc-status-details-bin"
SECONDS_LEFT = "tandem-seconds-left"  # until a call's deadline, which Serve does not pass to replicas
OTHER_HOST = "Serve's gRPC port has no TLS and answers its own host alone: start the application with --insecure"
Register = Callable[[Any, Any], None]


def servicer_functions(insecure: bool) -> list[str]:
    """Returns the names of the functions that Serve's proxy imports and calls.

    Unless `insecure`, callers on other hosts are refused, because Ray Serve binds its gRPC port to every interface and
    has no option for that (grpc_util.py of 2.60).
    """
    names = ("target", "fused", "draft_worker", "prefill")
    return [f"{__name__}.{'' if insecure else 'own_host_'}{name}" for name in names]


def _add(add: Register, application: str, own_host: bool, servicer: Any, server: Any) -> None:
    """Registers a service and wraps the handlers that the proxy creates for it."""
    make = server.service_handler_factory
    server.service_handler_factory = partial(_routed, make, application, own_host)
    try:
        add(servicer, server)
    finally:
        server.service_handler_factory = make


def _both(add: Register, application: str) -> tuple[Register, Register]:
    """Returns two functions that register a service: for all callers, and for those on the proxy's own host."""
    return partial(_add, add, application, False), partial(_add, add, application, True)


target, own_host_target = _both(add_TargetVerifierServicer_to_server, TARGET)
fused, own_host_fused = _both(add_FusedSpeculativeServerServicer_to_server, FUSED)
draft_worker, own_host_draft_worker = _both(add_DraftWorkerServicer_to_server, DRAFT)
prefill, own_host_prefill = _both(add_PrefillWorkerServicer_to_server, PREFILL)


def _routed(
    make: Callable[..., Any], application: str, own_host: bool, service_method: str, streaming_type: Any
) -> Callable[..., Any]:
    """Creates the proxy's handler of one method and adds the routing metadata to its calls."""
    handler = make(service_method=service_method, streaming_type=streaming_type)

    async def admitted(context: Any) -> None:
        if own_host and not on_this_machine(_host_of(context.peer())):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, OTHER_HOST)

    async def unary(request: Any, context: Any) -> Any:
        await admitted(context)
        routed = RoutedContext(context, application, _session_of(request))
        reply = await handler(request, routed)
        routed.settle()
        return reply

    async def stream(request: Any, context: Any) -> AsyncGenerator[Any, None]:
        await admitted(context)
        routed = RoutedContext(context, application, _session_of(request))
        async for reply in handler(request, routed):
            if reply or not routed.code():  # a failure comes with an empty reply
                yield reply
        routed.settle()

    async def rounds(requests: AsyncIterator[Any], context: Any) -> AsyncGenerator[Any, None]:
        await admitted(context)
        first = await anext(requests, None)
        routed = RoutedContext(context, application, _session_of(first))
        async for reply in handler(_from_first(first, requests), routed):
            if reply or not routed.code():
                yield reply
        routed.settle()

    return {"UNARY_UNARY": unary, "UNARY_STREAM": stream, "STREAM_STREAM": rounds}.get(streaming_type.name, handler)


def _host_of(peer: str) -> str:
    """Returns the host of a peer, ipv4:HOST:PORT or ipv6:[HOST]:PORT, whose brackets gRPC escapes."""
    return unquote(peer).partition(":")[2].rpartition(":")[0]


def _session_of(request: Any) -> str:
    return getattr(request, "session_id", "")


async def _from_first(first: Any, requests: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
    if first is None:
        return
    yield first
    async for request in requests:
        yield request


class RoutedContext:
    """Wraps a call's context and adds the routing metadata."""

    def __init__(self, context: Any, application: str, session_id: str) -> None:
        self._context = context
        self._added = [("application", application)] + ([("session_id", session_id)] if session_id else [])
        left = context.time_remaining()
        self._added += [] if left is None else [(SECONDS_LEFT, f"{left:.3f}")]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def invocation_metadata(self) -> tuple[tuple[str, Any], ...]:
        return (*(self._context.invocation_metadata() or ()), *self._added)

    def settle(self) -> None:
        """Turns Ray's INTERNAL, which means that a replica died, into UNAVAILABLE, on which clients resume.

        Tandem's own failures, which may be INTERNAL too, always carry status details.
        """
        told = any(key == STATUS_DETAILS for key, _ in self._context.trailing_metadata() or ())
        if self._context.code() is grpc.StatusCode.INTERNAL and not told:
            self._context.set_code(grpc.StatusCode.UNAVAILABLE)
