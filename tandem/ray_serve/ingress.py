"""Tandem's methods on Ray Serve's gRPC proxy: clients of ours call it as they call a server of ours.

Serve routes a call by its metadata: `application` names an application, `session_id` keeps calls with one value on one
replica. Our clients send neither; the proxy reads both from the call itself here, where Serve registers methods
(`gRPCOptions.grpc_servicer_functions`). No client changes, and nobody has to know that Ray is there.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from functools import partial
from typing import Any

import grpc

from tandem.rpc.channel import DRAFT, FUSED, TARGET
from tandem.v1.draft_worker_pb2_grpc import add_DraftWorkerServicer_to_server
from tandem.v1.fused_speculative_server_pb2_grpc import add_FusedSpeculativeServerServicer_to_server
from tandem.v1.target_verifier_pb2_grpc import add_TargetVerifierServicer_to_server

STATUS_DETAILS = "grpc-status-details-bin"
SECONDS_LEFT = "tandem-seconds-left"  # until a call's deadline, which Serve tells no replica
SERVICER_FUNCTIONS = tuple(f"{__name__}.add_{name}" for name in ("target", "fused", "draft_worker"))


def add_target(servicer: Any, server: Any) -> None:
    """Called by Serve's proxy."""
    _add(add_TargetVerifierServicer_to_server, TARGET, servicer, server)


def add_fused(servicer: Any, server: Any) -> None:
    """Called by Serve's proxy."""
    _add(add_FusedSpeculativeServerServicer_to_server, FUSED, servicer, server)


def add_draft_worker(servicer: Any, server: Any) -> None:
    """Called by Serve's proxy."""
    _add(add_DraftWorkerServicer_to_server, DRAFT, servicer, server)


def _add(add: Callable[[Any, Any], None], application: str, servicer: Any, server: Any) -> None:
    """Registers a service; the handlers that the proxy makes for it meanwhile are routed by ours."""
    make = server.service_handler_factory
    server.service_handler_factory = partial(_routed, make, application)
    try:
        add(servicer, server)
    finally:
        server.service_handler_factory = make


def _routed(make: Callable[..., Any], application: str, service_method: str, streaming_type: Any) -> Callable[..., Any]:
    """The proxy's handler of one method, told where its calls belong."""
    handler = make(service_method=service_method, streaming_type=streaming_type)

    async def unary(request: Any, context: Any) -> Any:
        routed = RoutedContext(context, application, _session_of(request))
        reply = await handler(request, routed)
        routed.settle()
        return reply

    async def stream(request: Any, context: Any) -> AsyncGenerator[Any, None]:
        routed = RoutedContext(context, application, _session_of(request))
        async for reply in handler(request, routed):
            if reply or not routed.code():  # a failure comes with a reply that has nothing in it
                yield reply
        routed.settle()

    async def rounds(requests: AsyncIterator[Any], context: Any) -> AsyncGenerator[Any, None]:
        first = await anext(requests, None)
        routed = RoutedContext(context, application, _session_of(first))
        async for reply in handler(_from_first(first, requests), routed):
            if reply or not routed.code():
                yield reply
        routed.settle()

    return {"UNARY_UNARY": unary, "UNARY_STREAM": stream, "STREAM_STREAM": rounds}.get(streaming_type.name, handler)


def _session_of(request: Any) -> str:
    return getattr(request, "session_id", "")


async def _from_first(first: Any, requests: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
    if first is None:
        return
    yield first
    async for request in requests:
        yield request


class RoutedContext:
    """A call's context whose metadata says where it belongs; all else is the call's own."""

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
        """What Ray itself calls INTERNAL is a replica that died: UNAVAILABLE to clients, who then resume.

        A failure of our own, INTERNAL too perhaps, is told by the details that replicas always send with one.
        """
        told = any(key == STATUS_DETAILS for key, _ in self._context.trailing_metadata() or ())
        if self._context.code() is grpc.StatusCode.INTERNAL and not told:
            self._context.set_code(grpc.StatusCode.UNAVAILABLE)
