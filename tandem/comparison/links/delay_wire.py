"""Computes when bytes on one direction of a link are due, and runs actions at those times (standard library only)."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from random import Random

from tandem.comparison.links.settings import SEGMENT_BYTES, wire_bits
from tandem.comparison.links.trace import IP_TCP_BYTES, TracedLink

PIECE_SECONDS = 0.001  # of data sent under a bandwidth limit; a piece is at least one segment
WAKE_SECONDS = 0.00006  # polls this long before a due time: waking a processor takes about 50 microseconds
MAX_FD = 1000  # select's limit is 1024; its timeout is in microseconds, epoll's in milliseconds

ABORT = struct.pack("ii", 1, 0)

Action = Callable[[], None]


class Loop:
    """Waits for sockets and due actions. Times are seconds of time.monotonic."""

    def __init__(self) -> None:
        self.reading: dict[int, Callable[[float], None]] = {}
        self.writing: dict[int, Action] = {}
        self._timers: list[tuple[float, int, Action]] = []
        self._order = itertools.count()

    def at(self, due: float, action: Action) -> None:
        """Schedules an action; actions due together run in order."""
        heapq.heappush(self._timers, (due, next(self._order), action))

    def run(self) -> None:
        while True:
            wait = max(0.0, self._timers[0][0] - time.monotonic() - WAKE_SECONDS) if self._timers else None
            readable, writable, _ = select.select(self.reading, self.writing, (), wait)
            now = time.monotonic()
            for fd in readable:
                if read := self.reading.get(fd):  # otherwise another action has closed it
                    read(now)
            for fd in writable:
                if write := self.writing.get(fd):
                    write()
            while self._timers and self._timers[0][0] <= time.monotonic():
                heapq.heappop(self._timers)[2]()

    def close(self, sock: socket.socket) -> None:
        if sock.fileno() >= 0:
            self.reading.pop(sock.fileno(), None)
            self.writing.pop(sock.fileno(), None)
            sock.close()

    def abort(self, sock: socket.socket) -> None:
        if sock.fileno() >= 0:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
            self.close(sock)


class Wire:
    """One direction of the link: seconds, bits per second (None: unlimited), or a trace in place of the rate."""

    def __init__(self) -> None:
        self._free_at = 0.0
        self.set()

    def set(
        self,
        delay: float = 0.0,
        rate: float | None = None,
        trace: TracedLink | None = None,
        jitter: float = 0.0,
        seed: int = 0,
    ) -> None:
        """Changes the link for new data. Jitter is drawn from `seed`."""
        self.delay, self._rate, self._trace, self._jitter = delay, rate, trace, jitter
        self._random = Random(seed)

    def due(self, now: float, size: int) -> float:
        """Returns when the last of `size` bytes sent at `now` arrives; occupies the wire meanwhile."""
        return self._leaves(now, size) + self.delay + (self._random.uniform(0, self._jitter) if self._jitter else 0.0)

    def _leaves(self, now: float, size: int) -> float:
        if self._trace:
            return self._trace.leaves(now, size + IP_TCP_BYTES) if size else now
        if self._rate is None:
            return now
        self._free_at = max(now, self._free_at) + wire_bits(size) / self._rate
        return self._free_at

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Splits data into pieces that arrive at once."""
        by_segment = self._trace is not None or self._jitter > 0
        if self._rate is None and not by_segment:
            yield data
            return
        segments = 1 if by_segment else max(1, int((self._rate or 0) * PIECE_SECONDS / 8 / SEGMENT_BYTES))
        for start in range(0, len(data), segments * SEGMENT_BYTES):
            yield data[start : start + segments * SEGMENT_BYTES]


def sharpen_timers() -> None:
    """Removes Linux's 50 microsecond timer slack."""
    with contextlib.suppress(OSError), open("/proc/self/timerslack_ns", "w") as slack:
        slack.write("1")
