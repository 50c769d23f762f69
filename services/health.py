"""Implements grpc.health.v1. Setting a status never blocks; each watcher gets the latest status when it reads."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.services.security.call_limits import host_of

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

MOST_WATCHERS = 1000
MOST_OF_ONE_HOST = 100
LONGEST_NAME = 256


class HealthService(health_pb2_grpc.HealthServicer):
    """Answers Check and Watch.

    A Watch whose client does not read blocks only itself. gRPC cannot end such a call, so it counts against the limit
    on watchers until its connection or the server ends.
    """

    def __init__(self, most: int = MOST_WATCHERS, most_of_one_host: int = MOST_OF_ONE_HOST) -> None:
        self._most, self._most_of_one_host = most, most_of_one_host
        self._statuses: dict[str, int] = {}
        self._changed: set[asyncio.Event] = set()
        self._watchers: Counter[str] = Counter()

    @property
    def watchers(self) -> int:
        """Number of running Watch calls."""
        return self._watchers.total()

    def set(self, status: int, *names: str) -> None:
        """Sets the status of services; the name "" stands for the whole server."""
        self._statuses.update(dict.fromkeys(names, status))
        for changed in self._changed:
            changed.set()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        name, said = request.service, None
        if len(name) > LONGEST_NAME:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"service: longer than {LONGEST_NAME} characters")
        await self._admit(context)
        with self._told() as changed:
            while True:
                changed.clear()
                status = self._statuses.get(name, SERVICE_UNKNOWN)
                if status != said:
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                    said = status
                await changed.wait()

    async def _admit(self, context: grpc.aio.ServicerContext) -> None:
        host = host_of(context.peer())
        if self.watchers >= self._most or self._watchers[host] >= self._most_of_one_host:
            most = f"{self._most_of_one_host} of one host, {self._most} in all"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"too many watches of this server's health: {most}")
        self._watchers[host] += 1
        context.add_done_callback(lambda _: self._left(host))

    def _left(self, host: str) -> None:
        self._watchers[host] -= 1
        if not self._watchers[host]:
            del self._watchers[host]

    @contextlib.contextmanager
    def _told(self) -> Iterator[asyncio.Event]:
        changed = asyncio.Event()
        self._changed.add(changed)
        try:
            yield changed
        finally:
            self._changed.discard(changed)
