"""Runs a server role as a Ray Serve replica: the same servicers, without a port."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import grpc
from google.protobuf import empty_pb2

from tandem.cli import main, roles
from tandem.ray_serve.ingress import SECONDS_LEFT
from tandem.rpc.logs import set_up
from tandem.services.engine_port.port import EnginePort
from tandem.services.health import SERVING, HealthService
from tandem.services.lifecycle import Lifecycle
from tandem.services.server import HostedService, ServeConfig

log = logging.getLogger("tandem.ray")

_NOTHING = empty_pb2.Empty()  # the reply that accompanies a failure


class Replica:
    """One replica of a role, configured by main.py's flags. Its methods are those of its service."""

    async def __init__(self, flags: Sequence[str]) -> None:  # type: ignore[misc]  # Serve awaits it
        args = main.parser().parse_args(flags)
        set_up(args.log_format, args.debug)
        self._stopping = asyncio.Event()
        self._handlers: dict[str, grpc.RpcMethodHandler] = {}
        self._interceptors: list[grpc.aio.ServerInterceptor] = []
        ready = asyncio.Event()
        self._running = asyncio.create_task(roles.serve(args, partial(self._host, ready)), name="role")
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({waiting, self._running}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        await self.check_health()

    async def check_health(self) -> None:
        """Raises the reason if the role has ended. Serve calls it every few seconds and replaces the replica then."""
        if self._running.done():
            lost = self._running.result()
            raise RuntimeError("the model's device is lost" if lost else "the role has ended")

    async def handler(self, method: str, context: ReplicaContext) -> grpc.RpcMethodHandler:
        """Returns a method of the service, wrapped by the interceptors that a Tandem server has."""

        async def found(details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            return self._handlers[method]

        intercepted: Callable[[Any], Awaitable[grpc.RpcMethodHandler]] = found
        for interceptor in reversed(self._interceptors):
            intercepted = partial(interceptor.intercept_service, intercepted)
        service = f"tandem.v1.{type(self).__name__}"
        return await intercepted(_Details(f"/{service}/{method}", context.invocation_metadata()))

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
        outermost: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> int:
        """Replaces tandem.services.server.serve, without a port, but for that of gateways, and without signals."""
        engine = EnginePort(config.engine, config.security, outermost) if config.engine else None
        hosted = await build()
        tasks = hosted.start()
        hosted.register(_Methods(self._handlers))
        self._interceptors += [*outermost, *config.security.interceptors()]
        log.info("%s is ready after %.1f s", hosted.service, config.startup.total())
        hosted.ready()
        if engine and hosted.engine_port:
            health = HealthService()
            health.set(SERVING, "")
            await engine.start(hosted.engine_port, health)
            log.info("VllmEngine is ready on port %d, for gateways", engine.port)
        ready.set()
        ends = [asyncio.create_task(event.wait()) for event in (self._stopping, hosted.lost)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        await lifecycle.drain(config.drain_seconds, lambda: 0 if hosted.lost.is_set() else hosted.busy())
        for task in (*tasks, *ends):
            task.cancel()
        await asyncio.gather(*tasks, *ends, return_exceptions=True)
        if engine:
            await engine.stop()
        if hosted.close:
            await hosted.close()
        return int(hosted.lost.is_set())


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


class _Details(NamedTuple):
    """The details of a call for interceptors (grpc.HandlerCallDetails)."""

    method: str
    invocation_metadata: Any


class _Methods:
    """Stands in for a server while a service registers, and collects its handlers by method name."""

    def __init__(self, handlers: dict[str, grpc.RpcMethodHandler]) -> None:
        self._handlers = handlers

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Ignores the same handlers in the form for older servers."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, grpc.RpcMethodHandler]) -> None:
        self._handlers.update(handlers)


def _unary(method: str) -> Callable[..., Awaitable[Any]]:
    async def call(self: Replica, request: Any, grpc_context: Any) -> Any:
        context = ReplicaContext(grpc_context)
        try:
            return await (await self.handler(method, context)).unary_unary(request, context)
        except grpc.aio.AbortError:
            return _NOTHING

    return call


def _stream(method: str) -> Callable[..., AsyncGenerator[Any, None]]:
    """Builds a streaming method. `request` is a message or a stream of messages (Serve's gRPCInputStream)."""

    async def call(self: Replica, request: Any, grpc_context: Any) -> AsyncGenerator[Any, None]:
        context = ReplicaContext(grpc_context)
        handler = await self.handler(method, context)
        try:
            async with contextlib.aclosing(
                (handler.unary_stream or handler.stream_stream)(request, context)
            ) as replies:
                async for reply in replies:
                    yield reply
        except grpc.aio.AbortError:
            yield _NOTHING

    return call


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
    Propose = _unary("Propose")
    EndProposals = _unary("EndProposals")
    Generate = _stream("Generate")
    ProposeStream = _stream("ProposeStream")


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
