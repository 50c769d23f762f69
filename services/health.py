"""Implements grpc.health.v1. Setting a status never blocks; watchers read the latest."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.services.calls import Context

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

LONGEST_NAME = 256


class HealthService(health_pb2_grpc.HealthServicer):
    """Answers Check and Watch. Unread Watches cannot be ended; the limit on probes counts them."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        self._changed: set[asyncio.Event] = set()

    @property
    def watchers(self) -> int:
        return len(self._changed)

    def set(self, status: int, *names: str) -> None:
        self._statuses.update(dict.fromkeys(names, status))
        for changed in self._changed:
            changed.set()

    @property
    def serving(self) -> bool:
        return self._statuses.get("") == SERVING

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        name, sent = request.service, None
        if len(name) > LONGEST_NAME:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"service: longer than {LONGEST_NAME} characters")
        with self._subscribed() as changed:
            while True:
                changed.clear()
                status = self._statuses.get(name, SERVICE_UNKNOWN)
                if status != sent:
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                    sent = status
                await changed.wait()

    @contextlib.contextmanager
    def _subscribed(self) -> Iterator[asyncio.Event]:
        changed = asyncio.Event()
        self._changed.add(changed)
        try:
            yield changed
        finally:
            self._changed.discard(changed)
