"""Measures a link's latency beyond its settings: small messages, directly and through the link.

The proxy's process answers them: here an answer would share the interpreter lock with the timer.
"""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from tandem.comparison.links.settings import SMALL_BYTES

SAMPLES = 200
FEWEST = 8
MOST_SECONDS = 4.0  # of sending, once there are the fewest samples


@dataclass(frozen=True, slots=True)
class LinkOverhead:
    """Round trips of 64-byte messages, in seconds."""

    nominal_s: float  # as configured
    direct_p50_s: float
    link_p50_s: float
    link_p95_s: float
    samples: int

    @property
    def added_s(self) -> float:
        """The link's median round trip minus the direct one and the configured one."""
        return self.link_p50_s - self.direct_p50_s - self.nominal_s


def measure_overhead(direct: str, through: str, nominal_s: float, samples: int) -> LinkOverhead:
    """Times messages to both addresses in turn, blocking. Raises OSError."""
    plain, linked = list[float](), list[float]()
    with ExitStack() as stack:
        ends = [(stack.enter_context(_connected(at)), found) for at, found in ((direct, plain), (through, linked))]
        for end, _ in ends:
            _round_trip(end)
        began = time.perf_counter()
        while len(linked) < samples and (len(linked) < FEWEST or time.perf_counter() - began < MOST_SECONDS):
            for end, found in ends:
                found.append(_round_trip(end))
    median, high = np.percentile(linked, (50, 95))
    return LinkOverhead(nominal_s, float(np.median(plain)), float(median), float(high), len(linked))


def _connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=30)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _round_trip(sock: socket.socket) -> float:
    sent, missing = time.perf_counter(), SMALL_BYTES
    sock.sendall(bytes(SMALL_BYTES))
    while missing > 0:
        data = sock.recv(missing)
        if not data:
            raise ConnectionError("link: the echo closed its connection")
        missing -= len(data)
    return time.perf_counter() - sent
