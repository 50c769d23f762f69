"""Routes the HTTP port's paths through the same layers as gRPC calls."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import grpc

from tandem.hints import meant
from tandem.services.health import HealthService
from tandem.services.http.address import HttpAddress
from tandem.services.http.errors import HttpError, Refusal, refused
from tandem.services.http.exchange import Exchange
from tandem.services.http.listener import Listener
from tandem.services.http.service import HttpService
from tandem.services.layers import Call, Layer
from tandem.services.security.call_limits import MessageTimeout, TransportInterceptor, WaitLimit
from tandem.services.security.config import Security
from tandem.services.security.limits import ServerLimits

Handler = Callable[[Call, Exchange], Awaitable[None]]
PAGE = Path(__file__).with_name("page.html")
PREFIX = "/tandem.v1.OpenAI/"  # of HTTP paths in logs and metrics, like a service's
MODELS = "/v1/models"
PROBES = ("/health", "/health/live")
ANY = "*"  # in allowed_hosts


class AllowedHosts:
    """Against DNS rebinding without keys: accepts this machine's names, configured names, and any address."""

    def __init__(self, listens_at: str, given: Iterable[str]) -> None:
        self._any = ANY in given
        self._names = {"localhost", socket.gethostname().lower(), listens_at.lower(), *(name.lower() for name in given)}

    def take(self, header: str | None) -> bool:
        """Whether a Host header is allowed; browsers always send one."""
        if self._any or not header:
            return True
        name = header.strip().lower()
        name = name.partition("]")[0].lstrip("[") if name.startswith("[") else name.rpartition(":")[0] or name
        return name.rstrip(".") in self._names or name.endswith(".localhost") or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class HttpApp:
    """An ASGI application. `grpc_port`: shown to probes. `hosts` None: any."""

    def __init__(
        self,
        service: HttpService,
        limits: ServerLimits,
        layers: Sequence[Layer],
        health: HealthService,
        grpc_port: int = 0,
        hosts: AllowedHosts | None = None,
    ) -> None:
        self._health, self._page, self._grpc_port = health, PAGE.read_bytes(), grpc_port
        self._hosts = hosts
        self._service, self._calls = service, TransportInterceptor(limits, layers)
        self._routes: dict[str, tuple[str, str, Handler]] = {
            "/v1/chat/completions": ("POST", "Generate", service.chat),
            "/v1/completions": ("POST", "Generate", service.completions),
            MODELS: ("GET", "Models", service.models),
            "/version": ("GET", "Version", service.version),
            "/v1/receipt_keys": ("GET", "ReceiptKeys", service.receipt_keys),
            "/metrics": ("GET", "Metrics", service.metrics),
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        exchange, path = Exchange(scope, receive, send), scope["path"].removesuffix("/") or "/"
        if refusal := self._refusal(exchange):
            await exchange.answer(refusal.status, refusal.content)
        elif path in PROBES:
            await self._probe(exchange, path)
        elif path == "/" and scope["method"] in ("GET", "HEAD"):
            policy = (b"content-security-policy", b"frame-ancestors 'none'")
            await exchange.page(200, self._page, ((b"content-type", b"text/html; charset=utf-8"), policy))
        else:
            await self._called(exchange, path, scope["method"])

    def _refusal(self, exchange: Exchange) -> Refusal | None:
        host, expected = exchange.header("host"), exchange.header("expect")
        if self._hosts and not self._hosts.take(host):
            return refused(
                403, "host_not_allowed", f"host: {host!r:.80} is not a name of this server (--allowed_hosts)"
            )
        if expected and expected.lower() != "100-continue":
            return refused(417, "expectation_failed", f"expect: {expected!r:.80} is not served: 100-continue is")
        return None

    async def _probe(self, exchange: Exchange, path: str) -> None:
        serving = path.endswith("live") or self._health.serving
        more = {"grpc_port": self._grpc_port} if self._grpc_port else {}
        await exchange.answer(200 if serving else 503, {"status": "serving" if serving else "not serving", **more})

    async def _called(self, exchange: Exchange, path: str, method: str) -> None:
        wanted, name, handler = self._route(path)
        call = Call(PREFIX + name, exchange.metadata, self._calls.layers)
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
        assert call.status, "ErrorLayer sets it"
        try:
            with WaitLimit(self._calls.limits.unread_seconds) as waiting:
                await waiting.until(exchange.refuse(call.status))
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


class HttpPort(Listener):
    """The port of OpenAI clients: serves from `start` on. Raises CannotListen."""

    def __init__(
        self, address: HttpAddress, security: Security, outermost: Sequence[Layer] = (), grpc_port: int = 0
    ) -> None:
        super().__init__("http_port", address.host, address.port, security.tls, address.keep_alive_seconds)
        self._address, self._security, self._outermost, self._grpc_port = address, security, outermost, grpc_port
        self._service: HttpService | None = None

    async def start(self, service: HttpService, health: HealthService) -> None:
        security, address = self._security, self._address
        guarded = security.tls is not None or security.tokens is not None
        hosts = None if guarded else AllowedHosts(address.host, address.allowed_hosts)
        layers = security.layers(self._outermost)
        self._service = service
        await self.serve(HttpApp(service, security.limits, layers, health, self._grpc_port, hosts))

    async def stop(self) -> None:
        if self._service:
            self._service.cut()
        await super().stop()
