"""Emulates a link with a delaying TCP proxy, without root: `python -m tandem.comparison.links.delay_proxy`.

Every byte arrives half a round trip later; under a bandwidth limit, all connections share one queue per direction. A
new connection costs one round trip, as TCP's handshake. There is no congestion window.

A process of its own, so that no Python thread delays it; it imports only the standard library. It answers each command
from stdin with one line, and exits when stdin is closed:

    listen HOST:PORT       ok PORT  forwards a new port on 127.0.0.1 to that address, up the link
    listen-back HOST:PORT  ok PORT  the same for a caller at the far end: its requests go down
    echo                   ok PORT  a port on 127.0.0.1 that sends back its input
    set JSON               ok AT    changes the LinkSettings; AT: the time.monotonic at which traces begin
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import json
import os
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from random import Random

from tandem.comparison.links.link_settings import (
    IP_TCP_BYTES,
    SEGMENT_BYTES,
    LinkSettings,
    TracedLink,
    read_trace,
    wire_bits,
)

READ_BYTES = 65_536
IN_FLIGHT_BYTES = 16 * 2**20  # per direction of a connection; beyond it, the proxy stops reading

END = b""

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


class Pipe:
    """Forwards bytes from `source` to `sink`, in order even when the delay shrinks."""

    def __init__(
        self,
        loop: Loop,
        wire: Wire,
        source: socket.socket,
        sink: socket.socket,
        broken: Callable[[socket.socket], None],
        ended: Action,
    ) -> None:
        self._loop, self.wire, self._source, self._sink = loop, wire, source, sink
        self._broken, self._ended = broken, ended
        self._under_way: deque[tuple[float, bytes]] = deque()
        self._in_flight = 0
        self._arrived: deque[bytes] = deque()
        self._read_all = False
        self.delivered_all = False

    def start(self) -> None:
        if self._source.fileno() >= 0 and not self._read_all and self._in_flight <= IN_FLIGHT_BYTES:
            self._loop.reading[self._source.fileno()] = self._read

    def emptied(self, now: float) -> float:
        return max([now + self.wire.delay, *(due for due, _ in self._under_way)])

    def _read(self, now: float) -> None:
        try:
            data = self._source.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._broken(self._source)
            return
        self._read_all = not data
        self._in_flight += len(data)
        for piece in self.wire.pieces(data) if data else (END,):
            due = self.wire.due(now, len(piece))
            self._under_way.append((due, piece))
            self._loop.at(due, self._arrive)
        if self._read_all or self._in_flight > IN_FLIGHT_BYTES:
            self._loop.reading.pop(self._source.fileno(), None)

    def _arrive(self) -> None:
        """Hands over due bytes in order; a late piece delays those behind it."""
        now = time.monotonic()
        while self._under_way and self._under_way[0][0] <= now:
            self._arrived.append(self._under_way.popleft()[1])
        if self._arrived and self._sink.fileno() >= 0 and self._sink.fileno() not in self._loop.writing:
            self._deliver()

    def _deliver(self) -> None:
        try:
            while self._arrived:
                if self._arrived[0] == END:
                    self._arrived.popleft()  # shut down once: the far side may be gone by the next timer
                    self._sink.shutdown(socket.SHUT_WR)
                    self._loop.writing.pop(self._sink.fileno(), None)
                    self.delivered_all = True
                    self._ended()
                    return
                piece = self._arrived.popleft()
                sent = self._sink.send(piece)
                self._in_flight -= sent
                if sent < len(piece):
                    self._arrived.appendleft(piece[sent:])
        except (BlockingIOError, InterruptedError):
            self._arrived.appendleft(piece)
            self._loop.writing[self._sink.fileno()] = self._deliver
            return
        except OSError:
            self._broken(self._sink)
            return
        self._loop.writing.pop(self._sink.fileno(), None)
        self.start()


class Connection:
    """Pairs a client connection (`near`) with its upstream connection (`far`)."""

    def __init__(
        self, loop: Loop, up: Wire, down: Wire, near: socket.socket, family: int, upstream: tuple[object, ...]
    ) -> None:
        self._loop, self._near, self._upstream = loop, near, upstream
        self._far = socket.socket(family, socket.SOCK_STREAM)
        for sock in (near, self._far):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._up = Pipe(loop, up, near, self._far, self._broken, self._ended)
        self._down = Pipe(loop, down, self._far, near, self._broken, self._ended)
        self._after(self._up, self._connect)

    def _after(self, way: Pipe, action: Action) -> None:
        """Runs an action after the link's delay this way."""
        self._loop.at(time.monotonic() + way.wire.delay, action)

    def _connect(self) -> None:
        code = self._far.connect_ex(self._upstream)
        if code in (0, errno.EINPROGRESS):
            self._loop.writing[self._far.fileno()] = self._connected
        else:
            self._refused()

    def _connected(self) -> None:
        self._loop.writing.pop(self._far.fileno(), None)
        if self._far.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._refused()
            return
        self._down.start()
        # A client may send once it knows that it is connected: earlier data waits in its socket.
        self._after(self._down, self._up.start)

    def _refused(self) -> None:
        self._loop.close(self._far)
        self._after(self._down, self._abort)

    def _broken(self, sock: socket.socket) -> None:
        """Ends one side: delivers its bytes, then closes the other side."""
        way = self._up if sock is self._near else self._down
        self._loop.close(sock)
        self._loop.at(way.emptied(time.monotonic()), self._abort)

    def _abort(self) -> None:
        self._loop.abort(self._near)
        self._loop.abort(self._far)

    def _ended(self) -> None:
        if self._up.delivered_all and self._down.delivered_all:
            self._loop.close(self._near)
            self._loop.close(self._far)


class Proxy:
    def __init__(self) -> None:
        self._loop, self._up, self._down = Loop(), Wire(), Wire()

    def run(self, control: int, replies: int) -> None:
        """Runs until `control` is closed. Both arguments are file descriptors."""
        unfinished = b""

        def obey(now: float) -> None:
            nonlocal unfinished
            received = os.read(control, READ_BYTES)
            if not received:
                raise SystemExit(0)
            *lines, unfinished = (unfinished + received).split(b"\n")
            for line in lines:
                os.write(replies, (self.answer(line.decode(errors="replace")) + "\n").encode())

        self._loop.reading[control] = obey
        self._loop.run()

    def answer(self, line: str) -> str:
        try:
            match line.split(maxsplit=1):
                case ["listen" | "listen-back" as way, upstream]:
                    return f"ok {self._listen(upstream, back=way == 'listen-back')}"
                case ["echo"]:
                    return f"ok {self._accepting(self._echo)}"
                case ["set", settings]:
                    return f"ok {self._set(LinkSettings(**json.loads(settings)))!r}"
        except (OSError, ValueError, LookupError, TypeError) as error:
            return f"error {error}"
        return f"error {line!r} is not a command"

    def _set(self, link: LinkSettings) -> float:
        """Applies settings to new data; returns when traces begin."""
        link.check()
        now, (up_mbps, down_mbps) = time.monotonic(), link.rates
        for seed, wire, mbps, path in (
            (1, self._up, up_mbps, link.trace_up),
            (2, self._down, down_mbps, link.trace_down),
        ):
            times = read_trace(path) if path else ()
            trace = TracedLink(times, now - link.trace_from * times[-1] / 1000) if times else None
            wire.set(link.seconds / 2, None if mbps is None else mbps * 1e6, trace, link.jitter_ms / 1000, seed)
        return now

    def _listen(self, upstream: str, back: bool) -> int:
        host, _, port = upstream.rpartition(":")
        if not 0 < int(port) < 65536:
            raise ValueError(f"{port} is not a port")
        family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        up, down = (self._down, self._up) if back else (self._up, self._down)
        return self._accepting(lambda near: Connection(self._loop, up, down, near, family, address))

    def _echo(self, sock: socket.socket) -> None:
        def answer(now: float) -> None:
            try:
                data = sock.recv(READ_BYTES)
                sock.sendall(data)
            except OSError:
                data = b""
            if not data:
                self._loop.close(sock)

        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._loop.reading[sock.fileno()] = answer

    def _accepting(self, serve: Callable[[socket.socket], object]) -> int:
        """Returns a new port, whose connections are served."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        listener.setblocking(False)

        def accept(now: float) -> None:
            with contextlib.suppress(OSError):  # the client has disconnected already
                near, _ = listener.accept()
                if near.fileno() > MAX_FD:
                    near.close()
                else:
                    serve(near)

        self._loop.reading[listener.fileno()] = accept
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    with contextlib.suppress(OSError), open("/proc/self/timerslack_ns", "w") as slack:
        slack.write("1")  # instead of Linux's 50 microseconds
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        Proxy().run(sys.stdin.fileno(), sys.stdout.fileno())
