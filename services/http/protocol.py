"""Bounds what a connection may cost before a request is read: its headers, their time, and their number."""

from __future__ import annotations

import asyncio
import json
import ssl

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tandem.services.http.errors import RETRY_SECONDS

HEADER_BYTES = 32 * 1024
HEADER_SECONDS = 10.0
CONNECTIONS = 2048
LINGER_SECONDS = 1.0


def _closing(status: str, kind: str, code: str, message: str, headers: str = "") -> bytes:
    """Builds the answer of a connection that is closed before a request is read."""
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})
    head = f"HTTP/1.1 {status}\r\n{headers}connection: close\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()


_BUSY = _closing(
    "503 Service Unavailable",
    "server_error",
    "too_many_connections",
    f"this server has its limit of {CONNECTIONS} connections",
    f"retry-after: {RETRY_SECONDS}\r\n",
)
_TOO_LARGE = _closing(
    "431 Request Header Fields Too Large",
    "invalid_request_error",
    "headers_too_large",
    f"the headers are above the limit of {HEADER_BYTES} bytes",
)


class BoundedProtocol(HttpToolsProtocol):
    """A connection that is closed if its headers are too large or late, or there are too many like it.

    Requests find it in their scope, as `tandem`.
    """

    certificate: bytes | None = None
    """The client's, in PEM, if it showed one."""
    _headers = 0
    _late: asyncio.TimerHandle | None = None
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS:
            self._refuse(_BUSY)
            return
        secured = transport.get_extra_info("ssl_object")
        shown = secured.getpeercert(binary_form=True) if secured else None
        self.certificate = ssl.DER_cert_to_PEM_cert(shown).encode() if shown else None
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._headers += len(data)
        super().data_received(data)
        if self._late and self._headers > HEADER_BYTES:
            self._refuse(_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["tandem"] = self  # type: ignore[typeddict-unknown-key]
        if not self._late:
            self._wait()

    def on_headers_complete(self) -> None:
        self._came()
        super().on_headers_complete()

    def _wait(self) -> None:
        """Closes the connection unless headers come in time."""
        self._headers = 0
        self._late = self.loop.call_later(HEADER_SECONDS, self._give_up)

    def _came(self) -> None:
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
        self.transport.write(answer)
        if not self.transport.can_write_eof():  # TLS
            self.transport.close()
            return
        self.transport.write_eof()
        self._late = self.loop.call_later(LINGER_SECONDS, self._give_up)
