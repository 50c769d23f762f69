"""An emulated link to servers at its far end; its settings can change while they run.

async with DelayLink() as link:
    address = await link.listen(server.address)            # clients connect here
    await link.set(LinkSettings(rtt_ms=20, bandwidth_mbps=100))
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tandem.comparison.links.link_settings import SMALL_BYTES, LinkSettings

PROXY = "tandem.comparison.links.delay_proxy"
ROOT = Path(__file__).resolve().parents[3]
GRACE_SECONDS = 2.0
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
        """The link's median round trip minus the direct and the configured one; 0 where noise makes it less."""
        return max(0.0, self.link_p50_s - self.direct_p50_s - self.nominal_s)


class DelayLink:
    """Runs the delay proxy on 127.0.0.1, once. Methods raise RuntimeError if it has exited."""

    def __init__(self) -> None:
        self.settings = LinkSettings(0.0)
        self._proxy: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> DelayLink:
        # Without site-packages it starts in 50 ms. Only this process holds its stdin, so it cannot outlive us.
        self._proxy = await asyncio.create_subprocess_exec(
            *(sys.executable, "-E", "-s", "-S", "-m", PROXY),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=ROOT,
            start_new_session=True,  # Ctrl-C on the terminal must reach only the driver
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Ends the proxy, also if the wait is cancelled."""
        if self._proxy is None:
            return
        assert self._proxy.stdin, "its stdin is a pipe"
        waiting = asyncio.ensure_future(self._proxy.wait())
        try:
            self._proxy.stdin.close()
            await asyncio.wait((waiting,), timeout=GRACE_SECONDS)
        finally:
            waiting.cancel()
            if self._proxy.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._proxy.kill()
        await self._proxy.wait()

    @property
    def pid(self) -> int:
        assert self._proxy is not None, "not entered"
        return self._proxy.pid

    async def listen(self, upstream: str, back: bool = False) -> str:
        """Returns the local address across the link to `upstream`. `back`: for callers at the far end."""
        return f"127.0.0.1:{await self._ask(f'listen-back {upstream}' if back else f'listen {upstream}')}"

    async def set(self, settings: LinkSettings) -> None:
        """Changes the settings, also for open connections; data in flight keeps its due time."""
        await self._ask(f"set {json.dumps(asdict(settings))}")
        self.settings = settings

    async def overhead(self, samples: int = SAMPLES) -> LinkOverhead:
        """Measures latency beyond the settings with small messages, in a few seconds."""
        direct = f"127.0.0.1:{await self._ask('echo')}"
        through = await self.listen(direct)
        return await asyncio.to_thread(measure_overhead, direct, through, self.settings.small_round_trip(), samples)

    async def _ask(self, command: str) -> str:
        """Sends a command and returns its `ok` value. Raises ValueError with any other answer."""
        proxy = self._proxy
        assert proxy is not None and proxy.stdin and proxy.stdout and proxy.stderr, "not entered"
        async with self._turn:
            with contextlib.suppress(ConnectionError):  # it has exited: readline returns nothing
                proxy.stdin.write(f"{command}\n".encode())
                await proxy.stdin.drain()
            line = (await proxy.stdout.readline()).decode().strip()
        if not line:
            errors = (await proxy.stderr.read()).decode(errors="replace").strip()
            why = f": {errors.splitlines()[-1]}" if errors else ""
            raise RuntimeError(f"link: {PROXY} ended with code {await proxy.wait()}{why}")
        status, _, rest = line.partition(" ")
        if status != "ok":
            raise ValueError(f"link: {PROXY}, asked to {command}: {rest}")
        return rest


def measure_overhead(direct: str, through: str, nominal_s: float, samples: int) -> LinkOverhead:
    """Times messages to both addresses in turn, blocking. Raises OSError."""
    plain, linked = list[float](), list[float]()
    with contextlib.ExitStack() as stack:
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
