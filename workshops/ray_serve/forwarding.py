"""Passes calls from Ray Serve's gRPC proxy to a replica and its server process.

Serve routes by metadata: `application` names the application, and calls of a `session_id` share a replica. Tandem's
clients send neither; the handlers derive both from service and request.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import signal
import subprocess
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc
from google.protobuf import empty_pb2
from google.protobuf.message_factory import GetMessageClass

from tandem.launch import LAUNCH, environment
from tandem.rpc.credentials import on_this_machine
from tandem.v1 import draft_worker_pb2, fused_speculative_server_pb2, prefill_worker_pb2, target_verifier_pb2

SERVICES = {
    "target": target_verifier_pb2.DESCRIPTOR.services_by_name["TargetVerifier"],
    "fused_target": fused_speculative_server_pb2.DESCRIPTOR.services_by_name["FusedSpeculativeServer"],
    "draft_worker": draft_worker_pb2.DESCRIPTOR.services_by_name["DraftWorker"],
    "prefill": prefill_worker_pb2.DESCRIPTOR.services_by_name["PrefillWorker"],
}
OTHER_HOST = "Serve's gRPC port has no TLS and answers its own host alone: put a proxy with TLS in front"
DETAILS = "grpc-status-details-bin"
FORWARDED = ("authorization", "x-request-id", "traceparent", "tracestate")


def register(servicer: Any, server: Any) -> None:
    """Registers all services; Serve's proxy calls it by name."""
    make = server.service_handler_factory
    server.service_handler_factory = partial(_routed, make)
    for service in SERVICES.values():
        handlers = {method.name: _handler(method) for method in service.methods}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
    server.service_handler_factory = make


def _handler(method: Any) -> grpc.RpcMethodHandler:
    """A method's kind and codec, without the proxy's behaviour."""
    made = getattr(grpc, f"{_kind(method)}_rpc_method_handler")
    return made(None, request_deserializer=GetMessageClass(method.input_type).FromString)


def _kind(method: Any) -> str:
    return "_".join("stream" if streams else "unary" for streams in (method.client_streaming, method.server_streaming))


def _routed(make: Callable[..., Any], service_method: str, streaming_type: Any) -> Callable[..., Any]:
    """The proxy's handler of a method, with routing metadata."""
    handler = make(service_method=service_method, streaming_type=streaming_type)
    application = service_method.rpartition("/")[0].rpartition(".")[2]

    async def stream(request: Any, context: Any, first: Any = None) -> AsyncGenerator[Any, None]:
        if not on_this_machine(unquote(context.peer()).partition(":")[2].rpartition(":")[0]):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, OTHER_HOST)  # Serve binds to every interface (2.60)
        context = RoutedContext(context, application, getattr(first or request, "session_id", ""))
        answer = handler(request, context)
        async for reply in answer if hasattr(answer, "__aiter__") else _alone(answer):
            if reply or not context.code():  # a failure comes with an empty reply
                yield reply
        if context.code() is grpc.StatusCode.INTERNAL and DETAILS not in dict(context.trailing_metadata() or ()):
            context.set_code(grpc.StatusCode.UNAVAILABLE)  # the replica died; Tandem's own failures have details

    async def unary(request: Any, context: Any) -> Any:
        return next(iter([reply async for reply in stream(request, context)]), None)

    async def rounds(requests: AsyncIterator[Any], context: Any) -> AsyncGenerator[Any, None]:
        first = await anext(requests, None)
        async for reply in stream(_from_first(first, requests), context, first):
            yield reply

    return {"UNARY_UNARY": unary, "UNARY_STREAM": stream, "STREAM_STREAM": rounds}.get(streaming_type.name, handler)


async def _alone(answer: Any) -> AsyncGenerator[Any, None]:
    yield await answer


async def _from_first(first: Any, requests: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
    if first is not None:
        yield first
    async for request in requests:
        yield request


class RoutedContext:
    """A call's context with routing metadata."""

    def __init__(self, context: Any, application: str, session_id: str) -> None:
        self._context = context
        self._added = [("application", application)] + ([("session_id", session_id)] if session_id else [])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def invocation_metadata(self) -> tuple[tuple[str, Any], ...]:
        return (*(self._context.invocation_metadata() or ()), *self._added)


class Replica:
    """A replica of a role. Its methods are the service's (replica_of)."""

    async def __init__(self, flags: Sequence[str]) -> None:  # type: ignore[misc]  # Serve awaits it
        with tempfile.TemporaryDirectory() as folder:
            ready = Path(folder, "ready")
            command = [*LAUNCH, *flags, "--host=127.0.0.1", "--port=0", f"--ready_file={ready}"]
            ending = partial(ctypes.CDLL(None).prctl, 1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its replica
            self._server = subprocess.Popen(command, env=environment(), preexec_fn=ending)
            while not ready.exists():
                await self.check_health()
                await asyncio.sleep(0.05)
            self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{json.loads(ready.read_text())['port']}")

    async def check_health(self) -> None:
        """Raises RuntimeError if the server has ended; Serve then replaces the replica."""
        if self._server.poll() is not None:
            raise RuntimeError(f"the server ended with code {self._server.returncode}, see its log")

    async def replies(self, kind: str, path: str, answer: Any, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        """Passes a call on. A failure sets the status and yields an empty reply."""
        method = getattr(self._channel, kind)(path, lambda each: each.SerializeToString(), answer.FromString)
        call = method(request, metadata=[each for each in context.invocation_metadata() if each[0] in FORWARDED])
        try:
            async for reply in call if kind.endswith("stream") else _alone(call):
                yield reply
        except grpc.aio.AioRpcError as error:
            context.set_code(error.code())
            context.set_details(error.details())
            context.set_trailing_metadata(list(error.trailing_metadata()))
            yield empty_pb2.Empty()
        finally:
            call.cancel()


def replica_of(role: str) -> type[Replica]:
    """The class of a role's replicas."""
    service = SERVICES[role]
    return type(service.name, (Replica,), {method.name: _method(method) for method in service.methods})


def _method(described: Any) -> Callable[..., Any]:
    path = f"/{described.containing_service.full_name}/{described.name}"
    way = (_kind(described), path, GetMessageClass(described.output_type))

    async def unary(self: Replica, request: Any, grpc_context: Any) -> Any:
        return next(iter([reply async for reply in self.replies(*way, request, grpc_context)]))

    async def stream(self: Replica, request: Any, grpc_context: Any) -> AsyncGenerator[Any, None]:
        async with contextlib.aclosing(self.replies(*way, request, grpc_context)) as replies:
            async for reply in replies:
                yield reply

    return stream if described.server_streaming else unary
