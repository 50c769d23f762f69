"""Bounds what a connection may cost: bytes of headers, trailers and what is left unread, their time, their number.

h11 parses: it bounds whatever is incomplete (headers, chunk lines, trailers) by one number.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import ssl
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from tandem.services.http.errors import RETRY_SECONDS

HEADER_BYTES = 32 * 1024
"""Of headers, of a chunk's line, of trailers: whatever must be whole before it is read."""
HEADER_SECONDS = 10.0
CONNECTIONS = 2048
LINGER_SECONDS = 1.0
LINGER_BYTES = 8 << 20
MOST_LINGERING = 256
_PHRASES = {400: "Bad Request", 431: "Request Header Fields Too Large", 501: "Not Implemented"}
_PHRASES |= {503: "Service Unavailable"}


def _closing(status: int, kind: str, code: str, message: str, headers: str = "") -> bytes:
    """Builds the answer of a connection that is closed before a request is read."""
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})
    head = f"HTTP/1.1 {status} {_PHRASES[status]}\r\n{headers}connection: close\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()


_BUSY = _closing(
    503,
    "server_error",
    "too_many_connections",
    f"this server has its limit of {CONNECTIONS} connections",
    f"retry-after: {RETRY_SECONDS}\r\n",
)
_MALFORMED = {
    400: _closing(400, "invalid_request_error", "malformed_request", "the request is not HTTP/1.1"),
    431: _closing(
        431, "invalid_request_error", "headers_too_large", f"the headers are above the limit of {HEADER_BYTES} bytes"
    ),
    501: _closing(501, "invalid_request_error", "unknown_transfer_coding", "the only transfer coding is chunked"),
}


def host_of(client: tuple[str, int] | None) -> str:
    """Who a connection counts for: its address; of IPv6 the network of 64 bits, which one host may have whole."""
    if client is None:
        return ""
    try:
        address = ipaddress.ip_address(client[0].partition("%")[0])
    except ValueError:
        return client[0]
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(getattr(address, "ipv4_mapped", None) or address)


def to_make_way(connections: Iterable[BoundedProtocol], counts: Counter[str], newcomer: str) -> BoundedProtocol | None:
    """The oldest connection without a request under way, of the host that has most; None if the newcomer has as many.

    So a host that takes all connections loses one to each that has fewer. `counts`: connections of each host.
    """
    most, count = counts.most_common(1)[0]
    if counts[newcomer] >= count:
        return None
    return min((each for each in connections if each.host == most and each.waits), key=lambda e: e.since, default=None)


class BoundedProtocol(H11Protocol):
    """A connection that is closed if its headers are too large or late, or there are too many like it.

    Requests find it in their scope, as `tandem`.
    """

    certificate: bytes | None = None
    """The client's, in PEM, if it showed one."""
    host, since = "", 0.0
    _head = 0  # bytes of the headers that are awaited
    _late: asyncio.TimerHandle | None = None
    _refused = False
    _lingering = 0  # of all connections
    _counts: Counter[str]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.host, self.since = host_of(self.client), self.loop.time()
        self._counts = vars(self.server_state).setdefault("hosts", Counter())
        if len(self.connections) > CONNECTIONS:
            others: Any = self.connections
            if (other := to_make_way(others, self._counts, self.host)) is None:
                self.connections.discard(self)
                self._refuse(_BUSY)
                return
            other.transport.abort()
        self._counts[self.host] += 1
        secured = transport.get_extra_info("ssl_object")
        shown = secured.getpeercert(binary_form=True) if secured else None
        self.certificate = ssl.DER_cert_to_PEM_cert(shown).encode() if shown else None
        self._wait()

    @property
    def waits(self) -> bool:
        """Whether no request of this connection is under way: none has come whole, or the last one is answered."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def connection_lost(self, exc: Exception | None) -> None:
        self._came()
        if self._refused:
            BoundedProtocol._lingering -= 1
        if self in self.connections:
            self._counts[self.host] -= 1
            if not self._counts[self.host]:
                del self._counts[self.host]
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
                self._refuse(_MALFORMED[431])
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
        """Answers what h11 refuses to parse, in the API's form. It is called while the error is handled."""
        status = getattr(sys.exc_info()[1], "error_status_hint", 400)
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()  # its answer has begun, or is being made
        else:
            self._refuse(_MALFORMED.get(status, _MALFORMED[400]))

    def _wait(self) -> None:
        """Closes the connection unless headers come in time."""
        self._late = self.loop.call_later(HEADER_SECONDS, self._give_up)

    def _came(self) -> None:
        self._head = 0
        if self._late:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        self._late = None
        self.transport.abort()

    def _refuse(self, answer: bytes) -> None:
        """Answers and closes, but reads on for a moment: what is unread would reset the connection and the answer."""
        self._came()
        self._refused = True
        BoundedProtocol._lingering += 1
        self.transport.write(answer)
        if not self.transport.can_write_eof() or BoundedProtocol._lingering > MOST_LINGERING:  # TLS; a flood
            self.transport.close()
            return
        self.transport.write_eof()
        self._late = self.loop.call_later(LINGER_SECONDS, self._give_up)
