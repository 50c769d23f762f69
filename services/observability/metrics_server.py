"""Serves metrics on own threads, so that a scrape delays no round. Imported only if on (extra `metrics`)."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from tandem.rpc.addresses import bracketed
from tandem.services.binding import bound

CONNECTIONS = 16
SILENT_SECONDS = 10.0  # until an idle connection is closed
_RETRY_SECONDS = 0.1


class _BoundedServer(ThreadingHTTPServer):
    """Allows CONNECTIONS connections; a new one closes the oldest."""

    daemon_threads = True
    request_queue_size = 128  # connections not accepted yet; further clients retry after a second

    def __init__(self, listening: socket.socket, handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: dict[socket.socket, threading.Event] = {}  # oldest first
        self._changing = threading.Lock()
        super().__init__(listening.getsockname(), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.server_activate()

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(_RETRY_SECONDS)  # the process is out of descriptors, so retrying at once cannot help
            raise

    def process_request(self, request: socket.socket, client_address: tuple[str, int]) -> None:  # type: ignore[override]
        with self._changing:
            oldest = next(iter(self._open.items())) if len(self._open) >= CONNECTIONS else None
        if oldest:
            with contextlib.suppress(OSError):
                oldest[0].shutdown(socket.SHUT_RDWR)  # wakes the thread that reads or writes it
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
        """Ignores clients that disconnect or are slow."""


class MetricsServer:
    """Listens at once (`port` 0: a free one); serves once `registry` is set. Raises ValueError."""

    def __init__(self, host: str, port: int) -> None:
        self.registry: CollectorRegistry | None = None
        self.host = bracketed(host, "metrics_host")
        outer = self

        class Handler(BaseHTTPRequestHandler):
            timeout = SILENT_SECONDS

            def do_GET(self) -> None:
                outer._answer(self)

            def log_message(self, format: str, *args: object) -> None:
                """Logs nothing."""

        self._server = _BoundedServer(bound("metrics_port", self.host, port), Handler)
        self.port = int(self._server.server_address[1])
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
