"""The metrics port under connections that say nothing: few are kept, and whoever asks is answered."""

from __future__ import annotations

import os
import socket
import threading
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter

from tandem.services.observability import metrics_server
from tandem.services.observability.metrics_server import CONNECTIONS, MetricsServer

MANY = 5 * CONNECTIONS


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    made = MetricsServer("127.0.0.1", 0)
    made.registry = CollectorRegistry()
    Counter("asked", "test", registry=made.registry).inc(7)
    yield made
    made.close()


def scraped(server: MetricsServer) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=20) as reply:
        return reply.read().decode()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_silent_connections_take_neither_threads_nor_descriptors_nor_the_place_of_a_scrape(
    server: MetricsServer,
) -> None:
    threads, open_before, silent = threading.active_count(), descriptors(), []
    try:
        for i in range(MANY):
            silent.append(socket.create_connection(("127.0.0.1", server.port)))
            if i % 2:
                silent[-1].sendall(b"GET /metrics HTTP/1.1\r\nX-Slow: ")  # begun, and never ended
            if i % 20 == 0:
                assert "asked_total 7.0" in scraped(server)
        assert "asked_total 7.0" in scraped(server)
        assert threading.active_count() - threads <= CONNECTIONS
        assert descriptors() - open_before - len(silent) <= CONNECTIONS
    finally:
        for each in silent:
            each.close()


def test_a_connection_that_stays_silent_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "SILENT_SECONDS", 0.05)
    server = MetricsServer("127.0.0.1", 0)
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as silent:
            assert silent.recv(1) == b""
    finally:
        server.close()


def test_a_reader_that_does_not_read_makes_room(server: MetricsServer) -> None:
    assert server.registry
    for i in range(40):
        Counter(f"filler_{i}", "x" * 100_000, registry=server.registry)  # more than a socket takes at once
    unread = []
    try:
        for _ in range(2 * CONNECTIONS):
            unread.append(socket.create_connection(("127.0.0.1", server.port)))
            unread[-1].sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert "asked_total 7.0" in scraped(server)
        assert len(server._server._open) <= CONNECTIONS
    finally:
        for each in unread:
            each.close()
