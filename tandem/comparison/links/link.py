"""Defines the link between client and servers, and the emulated link, which needs no root.

Servers run at the far end of a link. Its settings can change while they run:

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
    """By how many seconds chunks left the emulated link late; covers the last `chunks`, at most 8192."""

    p50_s: float
    p95_s: float
    max_s: float
    chunks: int


class Link(Protocol):
    """A link of either kind, used as an async context manager."""

    @property
    def command_prefix(self) -> Sequence[str]:
        """The prefix of the command of a server at the far end."""

    @property
    def host(self) -> str:
        """The host on which such a server listens."""

    @property
    def near_host(self) -> str:
        """The host on which a server at the near end listens for callers at the far end."""

    @property
    def settings(self) -> LinkSettings: ...

    async def listen(self, upstream: str) -> str:
        """Returns the host:port that leads across the link to the server at host:port `upstream`."""

    async def set(self, settings: LinkSettings) -> None:
        """Changes the settings, also for open connections."""

    async def overhead(self, samples: int = OVERHEAD_SAMPLES) -> LinkOverhead:
        """Measures what the link adds to its settings. Takes 0.3 s or 28 round trips, whichever is longer."""


class DelayLink:
    """Emulates a link with the TCP proxy `tandem.comparison.links.delay_proxy` on 127.0.0.1. Can be entered once.

    Every method raises RuntimeError if the proxy has exited.
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
        """Returns the address on 127.0.0.1 that leads to `upstream`. Raises ValueError if that is not an address."""
        return f"{self.host}:{await self._proxy.ask(f'listen {upstream}')}"

    async def set(self, settings: LinkSettings) -> None:
        """Changes the settings, also for open connections; data in flight keeps its due time and its order."""
        bandwidth = "none" if settings.bandwidth_mbps is None else f"{settings.bandwidth_mbps!r}"
        await self._proxy.ask(f"set {settings.rtt_ms!r} {bandwidth}")
        self.settings = settings

    async def lateness(self) -> Lateness:
        """Returns by how much data was late since the last `set`: what the link really did during a measurement."""
        p50, p95, most, chunks = (await self._proxy.ask("lateness")).split()
        return Lateness(float(p50), float(p95), float(most), int(chunks))

    async def overhead(self, samples: int = OVERHEAD_SAMPLES) -> LinkOverhead:
        """Measures round trips to an echo process, directly and through the proxy."""
        if self._echo is None:
            echo = await self._stack.enter_async_context(Echo())
            self._echo = echo.address, await self.listen(echo.address)
        return await asyncio.to_thread(measure_overhead, *self._echo, self.settings.round_trip_s(), samples)
