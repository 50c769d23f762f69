"""The HTTP port of a server, for OpenAI clients."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.services.health import HealthService
from tandem.services.http.address import HttpAddress
from tandem.services.http.app import HttpApp
from tandem.services.http.hosts import AllowedHosts
from tandem.services.http.listener import Listener
from tandem.services.http.service import HttpService
from tandem.services.layers import Layer
from tandem.services.security.config import Security


class HttpPort:
    """Binds at once and answers from `start` on. Raises CannotListen."""

    def __init__(
        self, address: HttpAddress, security: Security, outermost: Sequence[Layer] = (), grpc_port: int = 0
    ) -> None:
        self._security, self._outermost, self._grpc_port = security, outermost, grpc_port
        guarded = security.tls is not None or security.tokens is not None
        self._hosts = None if guarded else AllowedHosts(address.host, address.allowed_hosts)
        self._listener = Listener(address, security.tls)
        self.port, self.url = self._listener.port, self._listener.url
        self._service: HttpService | None = None

    async def start(self, service: HttpService, health: HealthService) -> None:
        self._service, layers = service, self._security.layers(self._outermost)
        await self._listener.start(
            HttpApp(service, self._security.limits, layers, health, self._grpc_port, self._hosts)
        )

    async def stop(self) -> None:
        """Ends what still runs with an error, and closes."""
        if self._service:
            self._service.cut()
        await self._listener.stop()
