"""Health checks on a separate port: Kubernetes' gRPC probes support neither TLS nor tokens."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2_grpc

from tandem.services.binding import bind
from tandem.services.calls import CallPolicy
from tandem.services.health import HealthService
from tandem.services.security.call_limits import TransportInterceptor
from tandem.services.security.limits import ServerLimits

_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 4096),
    ("grpc.max_concurrent_streams", 100),
)


class ProbePort:
    """Serves only grpc.health.v1, in clear text; `port` None: does not listen. Raises CannotListen."""

    def __init__(self, host: str, port: int | None, limits: ServerLimits) -> None:
        self._server = grpc.aio.server(interceptors=[TransportInterceptor(limits, CallPolicy())], options=_OPTIONS)
        if port is not None:
            bind("health_port", host, port, self._server.add_insecure_port)

    async def start(self, health: HealthService) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(health, self._server)
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(grace=0)
