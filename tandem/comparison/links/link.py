"""The network link between client and servers: what it is set to, and the emulated one, which needs no root.

A link has a far end, where the servers run, and is set and set again while they do:

    async with DelayLink() as link:                            # or NetnsLink()
        command = [*link.command_prefix, ..., "--host", link.host]
        address = await link.listen(server.address)            # what clients of that server connect to
        await link.set(LinkSettings(rtt_ms=20, bandwidth_mbps=100))
        overhead = await link.overhead()
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from tandem.comparison.links.line_process import LineProcess
from tandem.comparison.links.overhead import Echo, LinkOverhead, measure_overhead
from tandem.comparison.links.settings import LinkSettings

OVERHEAD_SAMPLES = 200


@dataclass(frozen=True, slots=True)
class Lateness:
    """How long after they were due chunks left the emulated link, in seconds: the last `chunks`, at most 8192."""

    p50_s: float
    p95_s: float
    max_s: float
    chunks: int


class Link(Protocol):
    """A link of either kind, entered as an async context."""

    @property
    def command_prefix(self) -> Sequence[str]:
        """Goes before the command of a server that is to run at the far end."""

    @property
    def host(self) -> str:
        """Where such a server listens."""

    @property
    def near_host(self) -> str:
        """Where a server of the near end listens, for callers of the far end."""

    @property
    def settings(self) -> LinkSettings: ...

    async def listen(self, upstream: str) -> str:
        """host:port that leads to `upstream`, the host:port of a server, across the link."""

    async def set(self, settings: LinkSettings) -> None:
        """From now on, also for connections that are open."""

    async def overhead(self, samples: int = OVERHEAD_SAMPLES) -> LinkOverhead:
        """What the link adds to its settings, measured now. Takes 0.3 s, or as long as 28 round trips."""


class DelayLink:
    """The emulated link: a TCP proxy on 127.0.0.1 that delays, `tandem.comparison.links.delay_proxy`. Entered once.

    Every method raises RuntimeError where the proxy has ended.
    """

    command_prefix: Sequence[str] = ()
    host = near_host = "127.0.0.1"

    def __init__(self) -> None:
        self._proxy = LineProcess("tandem.comparison.links.delay_proxy")
        self._stack = AsyncExitStack()
        self._echo: tuple[str, str] | None = None
        self.settings = LinkSettings()

    async def __aenter__(self) -> DelayLink:
        self._stack.push_async_callback(self._proxy.stop)
        await self._proxy.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def listen(self, upstream: str) -> str:
        """A port on 127.0.0.1 that leads to `upstream`. Raises ValueError where that is no address."""
        return f"{self.host}:{await self._proxy.ask(f'listen {upstream}')}"

    async def set(self, settings: LinkSettings) -> None:
        """From now on, also for connections that are open; what is under way keeps its time, and its place."""
        bandwidth = "none" if settings.bandwidth_mbps is None else f"{settings.bandwidth_mbps!r}"
        await self._proxy.ask(f"set {settings.rtt_ms!r} {bandwidth}")
        self.settings = settings

    async def lateness(self) -> Lateness:
        """Of what arrived since the last `set`: after a measurement, what the link really did during it."""
        p50, p95, most, chunks = (await self._proxy.ask("lateness")).split()
        return Lateness(float(p50), float(p95), float(most), int(chunks))

    async def overhead(self, samples: int = OVERHEAD_SAMPLES) -> LinkOverhead:
        """Measured now, against an echo process directly and through the proxy."""
        if self._echo is None:
            echo = await self._stack.enter_async_context(Echo())
            self._echo = echo.address, await self.listen(echo.address)
        return await asyncio.to_thread(measure_overhead, *self._echo, self.settings.round_trip_s(), samples)
