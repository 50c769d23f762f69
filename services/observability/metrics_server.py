"""The port that metrics are scraped at: a small HTTP server on threads of its own, so a scrape delays no round.

Whoever reaches it may say nothing, or slowly: connections are few and short, and a newcomer takes the oldest's place.
Needs the extra `metrics`: imported only where metrics are on.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

CONNECTIONS = 16
SILENT_SECONDS = 10.0  # until a connection ends on which nothing comes, or goes
_RETRY_SECONDS = 0.1


class _BoundedServer(ThreadingHTTPServer):
    """With CONNECTIONS at most, a thread and a descriptor each: the oldest makes room, since a scrape is short."""

    daemon_threads = True
    request_queue_size = 128  # of connections not accepted yet; beyond it who connects waits for a second

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: dict[socket.socket, threading.Event] = {}  # in the order in which they came
        self._changing = threading.Lock()
        super().__init__(address, handler)

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(_RETRY_SECONDS)  # the process has no descriptor left: asking again at once would change nothing
            raise

    def process_request(self, request: socket.socket, client_address: tuple[str, int]) -> None:  # type: ignore[override]
        with self._changing:
            oldest = next(iter(self._open.items())) if len(self._open) >= CONNECTIONS else None
        if oldest:
            with contextlib.suppress(OSError):
                oldest[0].shutdown(socket.SHUT_RDWR)  # whoever reads or writes it is woken
            oldest[1].wait(SILENT_SECONDS)
        with self._changing:
            self._open[request] = threading.Event()
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override]
        super().shutdown_request(request)
        with self._changing:
            closed = self._open.pop(request, None)
        if closed:
            closed.set()

    def handle_error(self, request: object, client_address: object) -> None:
        """Somebody who left, or was too slow, is no news."""


class MetricsServer:
    """Listens from the start, at `port` (0: a free one); answers once it has a registry. Raises ValueError."""

    def __init__(self, host: str, port: int) -> None:
        self.registry: CollectorRegistry | None = None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            timeout = SILENT_SECONDS

            def do_GET(self) -> None:
                outer._answer(self)

            def log_message(self, format: str, *args: object) -> None:
                """A scrape every few seconds is no news."""

        try:
            self._server = _BoundedServer((host, port), Handler)
        except OSError as error:
            raise ValueError(f"metrics_port: cannot listen on {host}:{port} ({error.strerror})") from None
        self.host, self.port = host, int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        if request.path.partition("?")[0] not in ("/metrics", "/"):
            return request.send_error(404)
        if self.registry is None:
            return request.send_error(503, "the server is starting")
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        page = encode(self.registry)
        request.send_response(200)
        request.send_header("Content-Type", content_type)
        request.send_header("Content-Length", str(len(page)))
        request.end_headers()
        request.wfile.write(page)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
