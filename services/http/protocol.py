"""Bounds what a connection may cost before a request is read: its headers, their time, and their number."""

from __future__ import annotations

import asyncio
import ssl

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADER_BYTES = 32 * 1024
HEADER_SECONDS = 10.0
CONNECTIONS = 2048
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedProtocol(HttpToolsProtocol):
    """A connection that is closed if its headers are too large or late, or there are too many like it.

    Requests find it in their scope, as `tandem`.
    """

    certificate: bytes | None = None
    """The client's, in PEM, if it showed one."""
    _headers = 0
    _late: asyncio.TimerHandle | None = None

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
        self._came()
        self.transport.write(answer)
        self.transport.close()
