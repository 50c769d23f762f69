"""The port for Prometheus. Imported only if on (extra `metrics`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from tandem.rpc.endpoint_pool import bracketed
from tandem.services.http.errors import refused
from tandem.services.http.exchange import Exchange
from tandem.services.http.listener import Listener

Page = Callable[[str], Awaitable[tuple[bytes, str]]]
"""Returns the metrics and their content type for an Accept header."""


class MetricsPort(Listener):
    """Has neither TLS nor tokens. Answers 503 until `page` is set. Raises CannotListen."""

    def __init__(self, host: str, port: int) -> None:
        self.host = bracketed(host, "metrics_host")
        self.page: Page | None = None
        super().__init__("metrics_port", self.host, port)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        exchange = Exchange(scope, receive, send)
        if scope["path"] not in ("/", "/metrics"):
            await exchange.answer(404, refused(404, "not_found", "metrics are at /metrics").content)
        elif self.page is None:
            await exchange.answer(503, refused(503, "starting", "the server is starting").content)
        else:
            data, kind = await self.page(exchange.header("accept") or "")
            await exchange.page(200, data, ((b"content-type", kind.encode()),))
