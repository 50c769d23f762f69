"""Implements Check of grpc.health.v1; Watch is not offered: its unread replies would have to be bounded."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.services.calls import Context
from tandem.services.statuses import NotOffered

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class HealthService(health_pb2_grpc.HealthServicer):
    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}

    def set(self, status: int, *names: str) -> None:
        self._statuses.update(dict.fromkeys(names, status))

    @property
    def serving(self) -> bool:
        return self._statuses.get("") == SERVING

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return health_pb2.HealthCheckResponse(status=status)

    def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        raise NotOffered("Watch: ask Check now and then")
