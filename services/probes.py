"""Health checks on a port of their own: for Kubernetes, whose gRPC probes know neither TLS nor tokens."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1._async import HealthServicer


class AddressInUse(ValueError):
    """A port cannot be bound."""


async def answer_probes(health: HealthServicer, host: str, port: int | None) -> grpc.aio.Server:
    """Answers grpc.health.v1 there and nothing else, in clear text; nowhere where `port` is None.

    Raises AddressInUse.
    """
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    if port is not None:
        try:
            server.add_insecure_port(f"{host}:{port}")
        except RuntimeError:
            raise AddressInUse(f"health_port: cannot listen on {host}:{port}; is another server there?") from None
        await server.start()
    return server
