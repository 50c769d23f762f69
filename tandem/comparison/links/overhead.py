"""Measures the latency that a link adds to its settings, with small messages sent directly and through it.

`tandem.comparison.links.echo` answers them in a separate process: here it would share the interpreter lock with the
timer.
"""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from tandem.comparison.links.echo import message
from tandem.comparison.links.line_process import LineProcess
from tandem.comparison.links.settings import SMALL_BYTES

WARM_UP = 10
SPACING_SECONDS = 0.00131
"""Not a divisor of common round trips, so that replies do not arrive just as the next message is sent."""


@dataclass(frozen=True, slots=True)
class LinkOverhead:
    """Round trips of 64-byte messages, in seconds. `nominal_s` is the configured round trip."""

    nominal_s: float
    direct_p50_s: float
    link_p50_s: float
    link_p95_s: float
    samples: int

    @property
    def added_s(self) -> float:
        """What the link itself adds: its median round trip minus the direct one and the configured one."""
        return self.link_p50_s - self.direct_p50_s - self.nominal_s


class Echo:
    """An echo process on this machine."""

    def __init__(self) -> None:
        self._process = LineProcess("tandem.comparison.links.echo", "127.0.0.1")
        self.address = ""

    async def __aenter__(self) -> Echo:
        try:
            await self._process.start()
            self.address = f"127.0.0.1:{await self._process.read()}"
        except BaseException:
            await self._process.stop()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._process.stop()


def measure_overhead(direct: str, through: str, nominal_s: float, samples: int) -> LinkOverhead:
    """Blocks for 1.3 ms or an eighth of the round trip per sample, whichever is longer; run it in a thread."""
    plain, linked = round_trips((direct, through), samples, spacing_for(nominal_s))
    median, high = np.percentile(linked, (50, 95))
    return LinkOverhead(nominal_s, float(np.median(plain)), float(median), float(high), samples)


def spacing_for(nominal_s: float) -> float:
    """Returns the seconds between messages that keep TCP's initial congestion window (ten segments) from filling."""
    return max(SPACING_SECONDS, nominal_s / 8)


class _Timed:
    """A connection with messages in flight."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.address = address
        self.sock = socket.create_connection((host, int(port)), timeout=30)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sent: deque[float] = deque()
        self._received = 0
        self.found: list[float] = []

    def send(self) -> None:
        self._sent.append(time.perf_counter())
        self.sock.sendall(message(SMALL_BYTES, SMALL_BYTES))

    def receive(self) -> None:
        data = self.sock.recv(65_536)
        now = time.perf_counter()
        if not data:
            raise ConnectionError(f"{self.address} closed after {len(self.found)} round trips")
        self._received += len(data)
        while self._received >= SMALL_BYTES:
            self._received -= SMALL_BYTES
            self.found.append(now - self._sent.popleft())


def round_trips(addresses: Sequence[str], samples: int, spacing_s: float) -> list[list[float]]:
    """Returns the seconds of `samples` round trips of 64 bytes to each of `addresses`, after a warm-up.

    Messages to one address start `spacing_s` apart without waiting for replies, so long links take little longer.
    Raises OSError if an address does not answer.
    """
    with ExitStack() as stack:
        ends = [_Timed(address) for address in addresses]
        by_fd = {stack.enter_context(end.sock).fileno(): end for end in ends}
        for end in ends:  # messages sent while a connection is being opened wait for it
            end.send()
            end.receive()
        turns = deque(ends * (samples + WARM_UP))
        wanted = 1 + WARM_UP + samples
        next_at = time.perf_counter()
        while any(len(end.found) < wanted for end in ends):
            wait = max(0.0, next_at - time.perf_counter()) if turns else 30.0
            if readable := select.select(by_fd, [], [], wait)[0]:
                for fd in readable:
                    by_fd[fd].receive()
            elif turns:
                turns.popleft().send()
                next_at = time.perf_counter() + spacing_s / len(ends)
            else:
                raise TimeoutError("no answer for 30 s")
    return [end.found[1 + WARM_UP :] for end in ends]
