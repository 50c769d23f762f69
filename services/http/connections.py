"""Bounds connections: number, time, header bytes and unread bytes. h11 bounds all that is incomplete at once."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import ssl
import sys
from collections.abc import Mapping

from uvicorn.protocols.http.h11_impl import H11Protocol

from tandem.services.http.refusals import RETRY_SECONDS, refused

HEADER_BYTES = 32 * 1024  # of headers, a chunk line, trailers
HEADER_SECONDS = 10.0
CONNECTIONS = 2048
LINGER_SECONDS = 1.0
LINGER_BYTES = 8 << 20
MOST_LINGERING = 256
_REFUSALS = {
    400: ("Bad Request", "malformed_request", "the request is not HTTP/1.1"),
    431: (
        "Request Header Fields Too Large",
        "headers_too_large",
        f"the headers are above the limit of {HEADER_BYTES} bytes",
    ),
    501: ("Not Implemented", "unknown_transfer_coding", "the only transfer coding is chunked"),
    503: (
        "Service Unavailable",
        "too_many_connections",
        f"this server has its limit of {CONNECTIONS} connections, or this host its share of them",
    ),
}
"""By status: phrase, code, message."""


def _closing(status: int) -> bytes:
    phrase, code, message = _REFUSALS[status]
    body = json.dumps(refused(status, code, message))
    head = f"HTTP/1.1 {status} {phrase}\r\nconnection: close\r\ncontent-type: application/json\r\n"
    head += f"retry-after: {RETRY_SECONDS}\r\n" if status == 503 else ""
    return f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()


def host_of(client: tuple[str, int] | None) -> str:
    """Returns the address a connection counts for; for IPv6 its /64 network."""
    if client is None:
        return ""
    try:
        address = ipaddress.ip_address(client[0].partition("%")[0])
    except ValueError:
        return client[0]
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(getattr(address, "ipv4_mapped", None) or address)


WAITS, IDLE, UPLOADS, RUNS = range(4)
"""Waiting for headers; between requests; in a body; request complete."""


def to_make_way(
    hosts: Mapping[str, Mapping[BoundedProtocol, None]], taken: int, newcomer: BoundedProtocol
) -> BoundedProtocol | None:
    """Returns the connection to close, perhaps `newcomer`, or None.

    Above half of CONNECTIONS, a host may have a quarter with incomplete requests; when full, the host with most loses
    one without a request, uploads last.
    """
    own = hosts[newcomer.host]
    if 2 * taken > CONNECTIONS:
        slow = [each for each in own if each.state in (WAITS, UPLOADS)]
        if 4 * (len(slow) - 1) >= CONNECTIONS:
            return min(slow, key=lambda each: each.state)
    if taken <= CONNECTIONS:
        return None
    most = max(hosts.values(), key=len)
    if len(own) == len(most):
        return newcomer
    return min((each for each in most if each.state != RUNS), key=lambda each: each.state, default=newcomer)


class BoundedProtocol(H11Protocol):
    """Closes on large or late headers or too many connections. Requests find it as `tandem` in their scope."""

    certificate: bytes | None = None  # the client's, PEM
    host = ""
    _head = 0  # bytes of the headers that are awaited
    _late: asyncio.TimerHandle | None = None
    _refused = False
    _lingering = 0  # of all connections
    _hosts: dict[str, dict[BoundedProtocol, None]]  # oldest first

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.host, self._hosts = host_of(self.client), vars(self.server_state).setdefault("hosts", {})
        self._hosts.setdefault(self.host, {})[self] = None
        other = to_make_way(self._hosts, len(self.connections), self)
        if other:
            other._leave()
            other.connections.discard(other)
        if other is self:
            self._refuse(503)
            return
        if other:
            other.transport.abort()
        secured = transport.get_extra_info("ssl_object")
        shown = secured.getpeercert(binary_form=True) if secured else None
        self.certificate = ssl.DER_cert_to_PEM_cert(shown).encode() if shown else None
        self._wait()

    @property
    def state(self) -> int:
        if self.cycle is None or self._head:
            return WAITS
        if self.cycle.response_complete:
            return IDLE
        return UPLOADS if self.cycle.more_body else RUNS

    def _leave(self) -> None:
        own = self._hosts.get(self.host, {})
        own.pop(self, None)
        if not own:
            self._hosts.pop(self.host, None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._came()
        if self._refused:
            BoundedProtocol._lingering -= 1
        self._leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._head += len(data)
            if self._head > LINGER_BYTES:
                self.transport.abort()
            return
        if self.cycle is None or self.cycle.response_complete:  # h11 bounds what is incomplete, not what comes at once
            end = data.find(b"\r\n\r\n")
            self._head += len(data) if end < 0 else end
            if self._head > HEADER_BYTES:
                self._refuse(431)
                return
        super().data_received(data)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._came()
            self.scope["tandem"] = self  # type: ignore[typeddict-unknown-key]
        elif not (self._late or self._refused) and (before is None or before.response_complete):
            self._wait()  # the next request's headers have begun

    def send_400_response(self, msg: str) -> None:
        """Answers h11's parse errors in OpenAI's form; called in the except block."""
        status = getattr(sys.exc_info()[1], "error_status_hint", 400)
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()  # its answer has begun, or is being made
        else:
            self._refuse(status if status in _REFUSALS else 400)

    def _wait(self) -> None:
        self._late = self.loop.call_later(HEADER_SECONDS, self._give_up)

    def _came(self) -> None:
        self._head = 0
        if self._late:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        self._late = None
        self.transport.abort()

    def _refuse(self, status: int) -> None:
        # Unread bytes would reset the connection before the answer arrives: read on for a moment.
        self._came()
        self._refused = True
        BoundedProtocol._lingering += 1
        self.transport.write(_closing(status))
        if not self.transport.can_write_eof() or BoundedProtocol._lingering > MOST_LINGERING:  # TLS; a flood
            self.transport.close()
            return
        self.transport.write_eof()
        self._late = self.loop.call_later(LINGER_SECONDS, self._give_up)
