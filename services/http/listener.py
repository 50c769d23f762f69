"""Runs uvicorn on this process's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import ssl
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvicorn

from tandem.rpc.endpoint_pool import bare_host, bracketed, joined
from tandem.services.binding import bound
from tandem.services.http.connections import HEADER_BYTES, BoundedProtocol
from tandem.services.http.exchange import Exchange
from tandem.services.http.refusals import refused
from tandem.services.security.tls import TlsConfig, reread

Page = Callable[[str], Awaitable[tuple[bytes, str]]]
"""Returns the metrics and their content type for an Accept header."""
ACCEPTED_AT_ONCE, MOST_UNACCEPTED = 64, 8192  # connections per accept, so that floods delay no request; the backlog
KEEP_ALIVE_SECONDS = 75  # of idle connections; balancers close theirs after 60
FLUSH_SECONDS = 1  # for aborted answers to reach their clients


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Listener:
    """A port for an ASGI app: binds at once, answers from `serve` on. Raises CannotListen."""

    def __init__(self, flag: str, host: str, port: int, tls: TlsConfig | None = None) -> None:
        self._host, self._tls = host, tls
        self._socket = bound(flag, host, port)
        self.port = int(self._socket.getsockname()[1])
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        host = bare_host(self._host)
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"{'https' if self._tls else 'http'}://{joined(host, self.port)}"

    async def serve(self, app: Any) -> None:
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
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=FLUSH_SECONDS,
        )
        _allow_open_files()
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        config.load()
        config.ssl = _renewed_context(self._tls) if self._tls else None
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve([self._socket]), name="http")
        while not (self._server.started or self._serving.done()):
            await asyncio.sleep(0.005)
        if not self._serving.done():
            self._socket.listen(MOST_UNACCEPTED)  # asyncio takes one number for both

    async def stop(self) -> None:
        if self._server and self._serving:
            self._server.should_exit = True
            await self._serving
        self._socket.close()


class MetricsPort(Listener):
    """The port of Prometheus, without TLS and tokens. Answers 503 until `page` is set. Raises CannotListen."""

    def __init__(self, host: str, port: int) -> None:
        self.host = bracketed(host, "metrics_host")
        self.page: Page | None = None
        super().__init__("metrics_port", self.host, port)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        exchange = Exchange(scope, receive, send)
        if scope["path"] not in ("/", "/metrics"):
            await exchange.answer(404, refused(404, "not_found", "metrics are at /metrics"))
        elif self.page is None:
            await exchange.answer(503, refused(503, "starting", "the server is starting"))
        else:
            data, kind = await self.page(exchange.header("accept") or "")
            await exchange.page(200, data, (("content-type", kind),))


def _allow_open_files() -> None:
    # The usual limit of 1024 open files would stop accepting.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _renewed_context(config: TlsConfig) -> ssl.SSLContext:
    """Returns a context that rereads changed certificate files for new connections."""
    certificates = reread(config, _context)

    def refresh(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = certificates.current()

    first = certificates.value
    first.sni_callback = refresh
    return first


def _context(config: TlsConfig) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=config.client_ca)
    context.load_cert_chain(config.cert, config.key, password="")
    context.verify_mode = ssl.CERT_REQUIRED if config.client_ca else ssl.CERT_NONE
    return context
