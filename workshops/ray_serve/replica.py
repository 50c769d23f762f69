"""Runs a server role as a Ray Serve replica: the same servicers, without a port."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import grpc
from google.protobuf import empty_pb2

from tandem.cli import configuration, main
from tandem.rpc.logs import set_up
from tandem.services.health import SERVING, HealthService
from tandem.services.layers import Call, Layer
from tandem.services.lifecycle import Lifecycle
from tandem.services.server import HostedService, ServeConfig, bound_http_port, first
from tandem.workshops.ray_serve.ingress import SECONDS_LEFT

log = logging.getLogger("tandem.ray")

_NOTHING = empty_pb2.Empty()  # the reply that accompanies a failure


class Replica:
    """One replica of a role, configured by main.py's flags. Its methods are those of its service."""

    async def __init__(self, flags: Sequence[str]) -> None:  # type: ignore[misc]  # Serve awaits it
        args = main.parser().parse_args(flags)
        set_up(args.log_format, args.debug)
        self._stopping = asyncio.Event()
        self._handlers: dict[str, grpc.RpcMethodHandler] = {}
        self._layers: list[Layer] = []
        ready = asyncio.Event()
        self._running = asyncio.create_task(configuration.serve(args, partial(self._host, ready)), name="role")
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({waiting, self._running}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        await self.check_health()

    async def check_health(self) -> None:
        """Raises the reason if the role has ended. Serve calls it every few seconds and replaces the replica then."""
        if self._running.done():
            failed = self._running.result()
            raise RuntimeError("the role ended with an error, see its log" if failed else "the role has ended")

    def begun(self, method: str, context: ReplicaContext) -> tuple[Call, grpc.RpcMethodHandler]:
        """Returns a call of a method of the service, to be answered inside the layers of a Tandem server."""
        handler = self._handlers[method]
        path = f"/tandem.v1.{type(self).__name__}/{method}"
        return Call(path, context.invocation_metadata(), self._layers, bool(handler.stream_stream)), handler

    async def __del__(self) -> None:
        """Drains idle sessions and frees the models. Serve calls it once no request is running."""
        self._stopping.set()
        await asyncio.gather(self._running, return_exceptions=True)

    async def _host(
        self,
        ready: asyncio.Event,
        config: ServeConfig,
        lifecycle: Lifecycle,
        build: Callable[[], Awaitable[HostedService]],
        outermost: Sequence[Layer] = (),
    ) -> int:
        """Replaces tandem.services.server.serve, without signals and ports, but for those of OpenAI clients."""
        http = bound_http_port(config, outermost)
        hosted = await build()
        health = HealthService()
        supervisor = hosted.start(lifecycle, health, "")
        hosted.register(_Methods(self._handlers))
        self._layers += config.security.layers(outermost)
        log.info("%s is ready after %.1f s", hosted.service, config.startup.total())
        hosted.ready()
        health.set(SERVING, "")
        if http and hosted.http:
            await http.start(hosted.http, health)
        ready.set()
        await first(self._stopping, hosted.lost, supervisor.gave_up)
        await lifecycle.drain(config.drain_seconds, lambda: 0 if hosted.lost.is_set() else hosted.busy())
        await supervisor.stop()
        if http:
            await http.stop()
        if hosted.close:
            await hosted.close()
        return int(hosted.lost.is_set() or supervisor.gave_up.is_set())


class ReplicaContext:
    """Adapts the context that Serve passes between proxy and replica to the interface that services use."""

    def __init__(self, carried: Any) -> None:
        self._carried, self._began = carried, time.monotonic()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._carried, name)

    async def abort_with_status(self, status: Any) -> None:
        """Sets the status and ends the call with an empty reply, since Serve drops the details of exceptions."""
        self._carried.set_code(status.code)
        self._carried.set_details(status.details)
        self.set_trailing_metadata(status.trailing_metadata)
        raise grpc.aio.AbortError()

    def set_trailing_metadata(self, metadata: Sequence[tuple[str, Any]]) -> None:
        """Passes the metadata as a list, which Serve requires."""
        self._carried.set_trailing_metadata(list(metadata))

    def time_remaining(self) -> float | None:
        """Returns the seconds until the call's deadline; None without a deadline."""
        for key, value in self._carried.invocation_metadata():
            if key == SECONDS_LEFT:
                return max(0.0, float(value) - (time.monotonic() - self._began))
        return None


class _Methods:
    """Stands in for a server while a service registers, and collects its handlers by method name."""

    def __init__(self, handlers: dict[str, grpc.RpcMethodHandler]) -> None:
        self._handlers = handlers

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Ignores the same handlers in the form for older servers."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, grpc.RpcMethodHandler]) -> None:
        self._handlers.update(handlers)


def _unary(method: str) -> Callable[..., Awaitable[Any]]:
    async def answer(self: Replica, request: Any, grpc_context: Any) -> Any:
        context = ReplicaContext(grpc_context)
        call, handler = self.begun(method, context)
        try:
            async with call.answered(context):
                return call.replied(await handler.unary_unary(call.received(request), context))
        except grpc.aio.AbortError:
            return _NOTHING

    return answer


def _stream(method: str) -> Callable[..., AsyncGenerator[Any, None]]:
    """Builds a streaming method. `request` is a message or a stream of messages (Serve's gRPCInputStream)."""

    async def answer(self: Replica, request: Any, grpc_context: Any) -> AsyncGenerator[Any, None]:
        context = ReplicaContext(grpc_context)
        call, handler = self.begun(method, context)
        try:
            async with call.answered(context):
                if call.dialogue:
                    answered = handler.stream_stream(_received(call, request), context)
                else:
                    answered = handler.unary_stream(call.received(request), context)
                async with contextlib.aclosing(answered) as replies:
                    async for reply in replies:
                        yield call.replied(reply)
        except grpc.aio.AbortError:
            yield _NOTHING

    return answer


async def _received(call: Call, requests: AsyncIterable[Any]) -> AsyncGenerator[Any, None]:
    async for request in requests:
        yield call.received(request)


class TargetVerifier(Replica):
    """--role target."""

    GetModelInfo = _unary("GetModelInfo")
    OpenSession = _unary("OpenSession")
    Verify = _unary("Verify")
    CloseSession = _unary("CloseSession")
    Generate = _stream("Generate")
    VerifyStream = _stream("VerifyStream")


class FusedSpeculativeServer(Replica):
    """--role fused_target."""

    GetModelInfo = _unary("GetModelInfo")
    Generate = _stream("Generate")


class DraftWorker(Replica):
    """--role draft_worker."""

    GetModelInfo = _unary("GetModelInfo")
    Generate = _stream("Generate")
    Propose = _stream("Propose")


class PrefillWorker(Replica):
    """--role prefill."""

    GetModelInfo = _unary("GetModelInfo")
    Prefill = _stream("Prefill")


REPLICAS: dict[str, type[Replica]] = {
    "target": TargetVerifier,
    "fused_target": FusedSpeculativeServer,
    "draft_worker": DraftWorker,
    "prefill": PrefillWorker,
}
