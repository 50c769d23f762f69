"""Delays packets between two TUN devices: `python -m benchmarks.packet_delay NEAR FAR`. Standard library only.

The kernel's TCP does the rest: each IP packet is written to the other device half a round-trip time after it was read
and, with a bandwidth limit, after its turn on the link. Prints `ready` when the devices exist and accepts
`set RTT_MS MBPS` like `tandem.comparison.links.delay_proxy`. Closing stdin ends it and removes the devices.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import sys
from functools import partial

from tandem.comparison.links.delay_wire import Loop, sharpen_timers

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
ETHERNET_BYTES = 14
PACKET_BYTES = 65_536


def open_tun(name: str) -> int:
    """Creates a device and returns its file descriptor."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return fd


class Direction:
    """Forwards packets from one device to the other."""

    def __init__(self, loop: Loop, source: int, sink: int) -> None:
        self._loop, self._source, self._sink = loop, source, sink
        self.delay, self.rate = 0.0, 0.0
        self._free_at = self._last_due = 0.0
        loop.reading[source] = self._read

    def _read(self, now: float) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                packet = os.read(self._source, PACKET_BYTES)
                begins = max(now, self._free_at)
                self._free_at = begins + (8 * (len(packet) + ETHERNET_BYTES) / self.rate if self.rate else 0.0)
                self._last_due = max(self._last_due, self._free_at + self.delay)
                self._loop.at(self._last_due, partial(self._write, packet))

    def _write(self, packet: bytes) -> None:
        with contextlib.suppress(OSError):  # packets may be lost
            os.write(self._sink, packet)


def main(near_name: str, far_name: str) -> None:
    near, far = open_tun(near_name), open_tun(far_name)
    loop = Loop()
    directions = (Direction(loop, near, far), Direction(loop, far, near))

    def obey(now: float) -> None:
        lines = os.read(sys.stdin.fileno(), 4096).decode().splitlines()
        if not lines:
            raise SystemExit(0)
        for line in lines:
            _, rtt_ms, mbps = line.split()
            for direction in directions:
                direction.delay = float(rtt_ms) / 2000
                direction.rate = 0.0 if mbps == "none" else float(mbps) * 1e6
            print("ok", flush=True)

    loop.reading[sys.stdin.fileno()] = obey
    print("ready", flush=True)
    loop.run()


if __name__ == "__main__":
    sharpen_timers()
    main(sys.argv[1], sys.argv[2])
