"""Routes the HTTP port's paths, as calls like those of gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import grpc

from tandem.hints import meant
from tandem.services.calls import Call, CallObserver
from tandem.services.health import HealthService
from tandem.services.http.exchange import Exchange
from tandem.services.http.listener import Listener
from tandem.services.http.refusals import HttpError, refused
from tandem.services.http.service import HttpService
from tandem.services.security.access import Security
from tandem.services.security.call_limits import MessageTimeout, within
from tandem.services.server import HttpAddress

Handler = Callable[[Call, Exchange], Awaitable[None]]
PAGE = Path(__file__).with_name("page.html")
PREFIX = "/tandem.v1.OpenAI/"  # of HTTP paths in logs and metrics, like a service's
MODELS = "/v1/models"
PROBES = ("/health", "/health/live")
ANY = "*"  # in allowed_hosts


def allowed(header: str | None, names: Collection[str]) -> bool:
    """Whether a Host header names this server. Against DNS rebinding; browsers always send one."""
    if not header or ANY in names:
        return True
    name = header.strip().lower()
    name = name.partition("]")[0].lstrip("[") if name.startswith("[") else name.rpartition(":")[0] or name
    if name.rstrip(".") in names or name.endswith(".localhost"):
        return True
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return False


class HttpPort(Listener):
    """The port of OpenAI clients: serves from `start` on. `grpc_port`: shown to probes. Raises CannotListen."""

    def __init__(
        self, address: HttpAddress, security: Security, observers: Sequence[CallObserver] = (), grpc_port: int = 0
    ) -> None:
        super().__init__("http_port", address.host, address.port, security.tls)
        self._grpc_port, self._page = grpc_port, PAGE.read_bytes()
        self._calls = security.interceptor(observers)
        guarded = security.tls is not None or security.tokens is not None
        own = ("localhost", socket.gethostname(), address.host, *address.allowed_hosts)
        self._names = (ANY,) if guarded else tuple(name.lower() for name in own)
        self._service: HttpService
        self._health: HealthService
        self._routes: dict[str, tuple[str, str, Handler]]

    async def start(self, service: HttpService, health: HealthService) -> None:
        self._service, self._health = service, health
        self._routes = {
            "/v1/chat/completions": ("POST", "Generate", service.chat),
            "/v1/completions": ("POST", "Generate", service.completions),
            MODELS: ("GET", "Models", service.models),
            "/version": ("GET", "Version", service.version),
            "/v1/receipt_keys": ("GET", "ReceiptKeys", service.receipt_keys),
            "/metrics": ("GET", "Metrics", service.metrics),
        }
        await self.serve(self)

    async def stop(self) -> None:
        if self._serving:
            self._service.cut()
        await super().stop()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        exchange, path = Exchange(scope, receive, send), scope["path"].removesuffix("/") or "/"
        host, expected = exchange.header("host"), exchange.header("expect")
        if not allowed(host, self._names):
            message = f"host: {host!r:.80} is not a name of this server (--allowed_hosts)"
            await exchange.answer(403, refused(403, "host_not_allowed", message))
        elif expected and expected.lower() != "100-continue":
            message = f"expect: {expected!r:.80} is not served: 100-continue is"
            await exchange.answer(417, refused(417, "expectation_failed", message))
        elif path in PROBES:
            await self._probe(exchange, path)
        elif path == "/" and scope["method"] in ("GET", "HEAD"):
            policy = ("content-security-policy", "frame-ancestors 'none'")
            await exchange.page(200, self._page, (("content-type", "text/html; charset=utf-8"), policy))
        else:
            await self._called(exchange, path, scope["method"])

    async def _probe(self, exchange: Exchange, path: str) -> None:
        serving = path.endswith("live") or self._health.serving
        more = {"grpc_port": self._grpc_port} if self._grpc_port else {}
        await exchange.answer(200 if serving else 503, {"status": "serving" if serving else "not serving", **more})

    async def _called(self, exchange: Exchange, path: str, method: str) -> None:
        wanted, name, handler = self._route(path)
        call = Call(PREFIX + name, exchange.metadata, self._calls)
        context: Any = exchange
        try:
            async with call.answered(context):
                exchange.request_id = call.request_id
                self._calls.count(call)
                if wanted not in ("", "GET" if method == "HEAD" else method):
                    raise HttpError("WRONG_METHOD", f"{path} takes {wanted}")
                await handler(call, exchange)
        except grpc.aio.AbortError:
            exchange.request_id = call.request_id
            await self._refuse(call, exchange)
        except asyncio.CancelledError:  # the client has left, or this process ends at once
            exchange.abandon()
            await asyncio.sleep(0)  # until uvicorn knows, which otherwise answers 500

    async def _refuse(self, call: Call, exchange: Exchange) -> None:
        assert call.status, "a call that fails has one"
        try:
            await within(self._calls.limits.unread_seconds, exchange.refuse(call.status))
        except MessageTimeout:
            exchange.abandon()

    def _route(self, path: str) -> tuple[str, str, Handler]:
        if found := self._routes.get(path):
            return found
        if path.startswith(f"{MODELS}/"):
            name = path[len(MODELS) + 1 :]
            return "GET", "Models", lambda call, exchange: self._service.models(call, exchange, name)

        async def unknown(call: Call, exchange: Exchange) -> None:
            known = ("/", *PROBES, *self._routes)
            message = f"nothing is served at {path[:128]!r}{meant(path[:128], known)}; see GET /"
            raise HttpError("NO_SUCH_PATH", message)

        return "", "Unknown", unknown
