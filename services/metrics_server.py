"""The port that metrics are scraped at: a small HTTP server on threads of its own, so a scrape delays no round.

Needs the extra `metrics`: imported only where metrics are on.
"""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder


class MetricsServer:
    """Listens from the start, at `port` (0: a free one); answers once it has a registry. Raises ValueError."""

    def __init__(self, host: str, port: int) -> None:
        self.registry: CollectorRegistry | None = None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer._answer(self)

            def log_message(self, format: str, *args: object) -> None:
                """A scrape every few seconds is no news."""

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise ValueError(f"metrics_port: cannot listen on {host}:{port} ({error.strerror})") from None
        self._server.daemon_threads = True
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
