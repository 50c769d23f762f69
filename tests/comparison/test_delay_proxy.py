"""The delay proxy as a process, between sockets of this one. Lower bounds are exact; upper ones one of many keeps."""

from __future__ import annotations

import contextlib
import fcntl
import json
import random
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tandem.comparison.links.link_settings import LinkSettings
from tests.support import HANG
from tests.timing import promptly, timed

ROOT = Path(__file__).resolve().parents[2]


class Proxy:
    """The process, and listeners behind it."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-E", "-s", "-S", "-m", "tandem.comparison.links.delay_proxy"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, request: str) -> str:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(request + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def set(self, rtt_ms: float, mbps: float | None = None, **more: Any) -> None:
        assert self.ask(f"set {json.dumps(asdict(LinkSettings(rtt_ms, mbps, **more)))}").startswith("ok ")

    def has_read(self, near: socket.socket) -> None:
        """Returns once it has read all that `near` sent: the kernel handed it over, and its loop turned twice since."""
        give_up = time.monotonic() + HANG
        while struct.unpack("i", fcntl.ioctl(near, termios.TIOCOUTQ, b"\0" * 4)) != (0,):
            assert time.monotonic() < give_up
        for _ in range(2):
            self.ask("nothing")

    def connected(self, listener: socket.socket) -> tuple[socket.socket, socket.socket]:
        """Both ends of a connection across the link, which is ready for bytes."""
        status, port = self.ask(f"listen 127.0.0.1:{listener.getsockname()[1]}").split()
        assert status == "ok"
        near = socket.create_connection(("127.0.0.1", int(port)), timeout=HANG)
        far, _ = listener.accept()
        for end in (near, far):
            end.settimeout(HANG)
        near.sendall(b"?")
        assert far.recv(1) == b"?"
        return near, far


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    proxy = Proxy()
    with proxy.process:
        yield proxy
        with contextlib.suppress(BrokenPipeError):
            assert proxy.process.stdin
            proxy.process.stdin.close()
        assert proxy.process.wait(timeout=HANG) == 0


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(HANG)
        yield listener


def received(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        more = sock.recv(size - len(data))
        assert more, f"closed after {len(data)} of {size} bytes"
        data += more
    return bytes(data)


def there(source: socket.socket, sink: socket.socket, data: bytes) -> float:
    """Seconds until all of it has arrived."""
    began = time.monotonic()
    source.sendall(data)
    received(sink, len(data))
    return time.monotonic() - began


def send_in_chunks(sock: socket.socket, data: bytes, seed: int) -> None:
    noise, start = random.Random(seed), 0
    while start < len(data):
        size = noise.choice((1, 7, 300, 5_000, 70_000))
        sock.sendall(data[start : start + size])
        start += size
        if noise.random() < 0.3:
            time.sleep(noise.random() / 500)


# --- bytes ---


@pytest.mark.parametrize("kind", ["unlimited", "limited", "recorded and jittery"])
def test_bytes_arrive_unchanged_and_in_order_in_both_directions_at_once(proxy, listener, kind, tmp_path):
    near, far = proxy.connected(listener)
    (tmp_path / "trace").write_text("".join(f"{each // 2}\n" for each in range(1, 1000)))
    recorded = {"jitter_ms": 3.0, "trace_up": str(tmp_path / "trace"), "trace_down": str(tmp_path / "trace")}
    proxy.set(6, 400.0 if kind == "limited" else None, **(recorded if kind.startswith("recorded") else {}))
    size = 300_000 if kind.startswith("recorded") else 1_500_000
    up, down = random.Random(1).randbytes(size), random.Random(2).randbytes(size)
    with near, far:
        senders = [
            threading.Thread(target=send_in_chunks, args=(near, up, 3)),
            threading.Thread(target=send_in_chunks, args=(far, down, 4)),
        ]
        got: dict[str, bytes] = {}
        reader = threading.Thread(target=lambda: got.update(down=received(near, len(down))))
        for thread in (*senders, reader):
            thread.start()
        got["up"] = received(far, len(up))
        for thread in (*senders, reader):
            thread.join()
    assert got["up"] == up
    assert got["down"] == down


def test_changing_the_delay_while_bytes_are_under_way_keeps_their_order(proxy, listener):
    near, far = proxy.connected(listener)
    with near, far:
        sent = b""
        for number, rtt_ms in enumerate((120, 20, 60, 0, 40, 0)):
            proxy.set(rtt_ms)
            for part in range(5):
                message = f"{number}.{part};".encode()
                near.sendall(message)
                sent += message
                time.sleep(0.002)
        assert received(far, len(sent)) == sent


def test_a_side_that_does_not_read_stops_the_other_from_sending_and_loses_nothing(proxy, listener):
    near, far = proxy.connected(listener)
    data = random.Random(5).randbytes(2**20)
    near.settimeout(0.5)
    sent, stuck = 0, 0
    with near, far:
        while stuck < 3 or sent < 16 * 2**20:  # a proxy that gets no processor looks stuck too
            try:
                sent += near.send(data[sent % len(data) :])
            except TimeoutError:
                stuck += 1
            assert sent < 256 * len(data), "more than the proxy and the kernel take"
        for start in range(0, sent, len(data)):
            size = min(len(data), sent - start)
            assert received(far, size) == data[:size]


# --- time ---


def test_nothing_arrives_earlier_than_half_the_round_trip_each_way(proxy, listener):
    near, far = proxy.connected(listener)
    proxy.set(20)
    with near, far:
        for _ in range(20):
            for source, sink in ((near, far), (far, near)):
                promptly(lambda source=source, sink=sink: there(source, sink, bytes(64)), 0.01)


def test_a_bandwidth_delays_by_bits_over_rate(proxy, listener):
    near, far = proxy.connected(listener)
    proxy.set(20, 8)
    with near, far:
        promptly(lambda: there(near, far, bytes(200_000)), 0.2 + 0.01)


def test_connections_share_the_bandwidth_and_directions_do_not(proxy, listener):
    first, first_far = proxy.connected(listener)
    second, second_far = proxy.connected(listener)
    proxy.set(0, 8)
    with first, first_far, second, second_far:

        def both_ways() -> float:
            began = time.monotonic()
            for sock in (first, second, first_far):
                sock.sendall(bytes(100_000))
            received(first, 100_000)
            back = time.monotonic() - began
            for sock in (first_far, second_far):
                received(sock, 100_000)
            assert time.monotonic() - began >= 0.2
            return back

        promptly(both_ways, 0.1)


def test_a_connection_costs_a_round_trip_before_its_first_bytes(proxy, listener):
    proxy.set(60)

    def connect() -> None:
        near, far = proxy.connected(listener)  # and half of one for the byte itself
        near.close()
        far.close()

    promptly(lambda: timed(connect), 0.09)


# --- ends ---


def test_half_a_connection_can_be_closed_and_the_other_half_goes_on(proxy, listener):
    near, far = proxy.connected(listener)
    proxy.set(40)
    with near, far:
        began = time.monotonic()
        near.sendall(b"last words")
        near.shutdown(socket.SHUT_WR)
        assert received(far, 10) == b"last words"
        assert far.recv(1) == b""
        assert time.monotonic() - began >= 0.02
        far.sendall(b"answer")
        far.close()
        assert received(near, 6) == b"answer"
        assert near.recv(1) == b""
        assert time.monotonic() - began >= 0.04


def test_a_reset_arrives_as_a_reset_and_no_earlier_than_bytes_would(proxy, listener):
    def reset() -> float:
        proxy.set(0)
        near, far = proxy.connected(listener)
        proxy.set(40)
        with far:
            began = time.monotonic()
            near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            near.close()
            with pytest.raises(ConnectionResetError):
                far.recv(1)
            return time.monotonic() - began

    promptly(reset, 0.02)


def test_a_refused_upstream_closes_the_connection_of_the_client_and_no_other(proxy, listener):
    near, far = proxy.connected(listener)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        nobody = gone.getsockname()[1]
    _, port = proxy.ask(f"listen 127.0.0.1:{nobody}").split()
    proxy.set(40)
    with near, far:
        began = time.monotonic()
        with (
            pytest.raises(ConnectionResetError),
            socket.create_connection(("127.0.0.1", int(port)), timeout=HANG) as one,
        ):
            one.recv(1)
        assert time.monotonic() - began >= 0.04
        near.sendall(b"still here")
        assert received(far, 10) == b"still here"


def test_it_ends_with_a_parent_that_is_killed():
    parent = """
import asyncio, os, signal
from tandem.comparison.links.link import DelayLink
async def main():
    async with DelayLink() as link:
        print(link.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", parent], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=HANG)
    assert ended.returncode == -9
    deadline = time.monotonic() + HANG
    while Path(f"/proc/{ended.stdout.strip()}/cmdline").exists() and time.monotonic() < deadline:
        if "delay_proxy" not in Path(f"/proc/{ended.stdout.strip()}/cmdline").read_text():
            break  # a zombie has none
        time.sleep(0.01)
    assert time.monotonic() < deadline


@pytest.mark.parametrize(
    "line",
    [
        "listen nowhere",
        "listen 127.0.0.1:http",
        "listen 127.0.0.1:65536",
        "set 20",
        'set {"rtt_ms": NaN}',
        'set {"rtt_ms": 20, "bandwidth_mbps": 0}',
        'set {"rtt_ms": 20, "loss": 0.1}',
        "sit down",
        "",
    ],
)
def test_a_line_that_it_does_not_understand_is_answered_with_an_error_and_changes_nothing(proxy, listener, line):
    assert proxy.ask(line).startswith("error ")
    near, far = proxy.connected(listener)
    near.close()
    far.close()
