"""Runs uvicorn on this process's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import ssl
from collections.abc import Iterator, Sequence

import uvicorn

from tandem.rpc.addresses import bare_host, joined
from tandem.services.binding import bound
from tandem.services.health import HealthService
from tandem.services.http.address import HttpAddress
from tandem.services.http.app import AllowedHosts, HttpApp
from tandem.services.http.protocol import HEADER_BYTES, BoundedProtocol
from tandem.services.http.service import HttpService
from tandem.services.layers import Layer
from tandem.services.security.config import Security
from tandem.services.security.tls import Certificates, TlsConfig

ACCEPTED_AT_ONCE, MOST_UNACCEPTED = 64, 8192  # connections per accept, so that floods delay no request; the backlog
FLUSH_SECONDS = 1  # for aborted answers to reach their clients


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpPort:
    """HTTP port for OpenAI clients: binds at once, serves from `start` on. Raises CannotListen."""

    def __init__(
        self, address: HttpAddress, security: Security, outermost: Sequence[Layer] = (), grpc_port: int = 0
    ) -> None:
        self._address, self._security, self._outermost, self._grpc_port = address, security, outermost, grpc_port
        self._socket = bound("http_port", address.host, address.port)
        self.port = int(self._socket.getsockname()[1])
        self._service: HttpService | None = None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        host = bare_host(self._address.host)
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"{'https' if self._security.tls else 'http'}://{joined(host, self.port)}"

    async def start(self, service: HttpService, health: HealthService) -> None:
        security, address = self._security, self._address
        guarded = security.tls is not None or security.tokens is not None
        hosts = None if guarded else AllowedHosts(address.host, address.allowed_hosts)
        layers = security.layers(self._outermost)
        self._service = service
        await self._serve(HttpApp(service, security.limits, layers, health, self._grpc_port, hosts))

    async def _serve(self, app: HttpApp) -> None:
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            h11_max_incomplete_event_size=HEADER_BYTES,
            ws="none",
            loop="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=ACCEPTED_AT_ONCE,
            timeout_keep_alive=self._address.keep_alive_seconds,  # type: ignore[arg-type]  # call_later takes it
            timeout_graceful_shutdown=FLUSH_SECONDS,
        )
        _allow_open_files()
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        config.load()
        config.ssl = _renewed_context(tls) if (tls := self._security.tls) else None
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve([self._socket]), name="http")
        while not (self._server.started or self._serving.done()):
            await asyncio.sleep(0.005)
        if not self._serving.done():
            self._socket.listen(MOST_UNACCEPTED)  # asyncio takes one number for both

    async def stop(self) -> None:
        if self._service:
            self._service.cut()
        if self._server and self._serving:
            self._server.should_exit = True
            await self._serving
        self._socket.close()


def _allow_open_files() -> None:
    # The usual limit of 1024 open files would stop accepting.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _renewed_context(config: TlsConfig) -> ssl.SSLContext:
    """Returns a context that rereads changed certificate files for new connections."""
    certificates = Certificates(config, _context)
    latest = certificates.first

    def refresh(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        nonlocal latest
        connection.context = latest = certificates.changed() or latest

    certificates.first.sni_callback = refresh
    return certificates.first


def _context(config: TlsConfig) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=config.client_ca)
    context.load_cert_chain(config.cert, config.key, password="")
    context.verify_mode = ssl.CERT_REQUIRED if config.client_ca else ssl.CERT_NONE
    return context
