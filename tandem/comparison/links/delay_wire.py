"""One direction of an emulated link as arithmetic on times, and the loop that keeps those times.

The standard library alone: the processes that use it start at once.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator

from tandem.comparison.links.settings import SEGMENT_BYTES, wire_bits

PIECE_SECONDS = 0.001
"""With a bandwidth, what is read at once is sent on in pieces that take about this long, at least a segment each."""
REMEMBERED = 4096
WAKE_SECONDS = 0.00006
"""Waking up takes a processor some 50 microseconds: it is woken before something is due, and polls until then."""
MAX_FD = 1000
"""select's own limit is 1024. It is used since its timeout is in microseconds; epoll's is in milliseconds."""

ABORT = struct.pack("ii", 1, 0)

Action = Callable[[], None]


class Loop:
    """What is readable, what is writable, what is due. Times are of time.monotonic, in seconds."""

    def __init__(self) -> None:
        self.reading: dict[int, Callable[[float], None]] = {}
        self.writing: dict[int, Action] = {}
        self._timers: list[tuple[float, int, Action]] = []
        self._order = itertools.count()

    def at(self, due: float, action: Action) -> None:
        """Actions that are due at the same time run in the order in which they were given."""
        heapq.heappush(self._timers, (due, next(self._order), action))

    def run(self) -> None:
        while True:
            wait = max(0.0, self._timers[0][0] - time.monotonic() - WAKE_SECONDS) if self._timers else None
            readable, writable, _ = select.select(self.reading, self.writing, (), wait)
            now = time.monotonic()
            for fd in readable:
                if read := self.reading.get(fd):  # else another action has closed it
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
        """Closes with a reset."""
        if sock.fileno() >= 0:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
            self.close(sock)


class Wire:
    """One direction of the link: `delay` seconds long; `rate` bits a second wide, or None where it has no limit."""

    def __init__(self) -> None:
        self.delay = 0.0
        self.rate: float | None = None
        self._free_at = 0.0
        self.late: deque[float] = deque(maxlen=REMEMBERED)

    def due(self, now: float, size: int) -> float:
        """When the last of `size` bytes that came at `now` is at the other end. The wire is taken until they are on."""
        if self.rate is None:
            return now + self.delay
        self._free_at = max(now, self._free_at) + wire_bits(size) / self.rate
        return self._free_at + self.delay

    def pieces(self, data: bytes) -> Iterator[bytes]:
        if self.rate is None:
            yield data
            return
        segments = max(1, int(self.rate * PIECE_SECONDS / 8 / SEGMENT_BYTES))
        for start in range(0, len(data), segments * SEGMENT_BYTES):
            yield data[start : start + segments * SEGMENT_BYTES]


def sharpen_timers() -> None:
    """Wake when asked to, not up to 50 microseconds later; before others, where we may. Linux, as far as it lets us."""
    with contextlib.suppress(OSError), open("/proc/self/timerslack_ns", "w") as slack:
        slack.write("1")
