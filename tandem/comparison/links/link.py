"""Defines the link between client and servers, and the emulated link, which needs no root.

Servers run at the far end of a link. Its settings can change while they run:

    async with DelayLink() as link:
        address = await link.listen(server.address)            # what clients of that server connect to
        await link.set(LinkSettings(rtt_ms=20, bandwidth_mbps=100))
        overhead = await link.overhead()
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import asdict

from tandem.comparison.links.line_process import LineProcess
from tandem.comparison.links.overhead import Echo, LinkOverhead, measure_overhead
from tandem.comparison.links.settings import LinkSettings

OVERHEAD_SAMPLES = 200


class Link:
    """The loopback of one machine, whose settings add nothing; DelayLink derives from it. Can be entered once."""

    def __init__(self) -> None:
        self.settings = LinkSettings(0.0)
        self._stack = AsyncExitStack()
        self._echoes: tuple[str, str] | None = None

    async def __aenter__(self) -> Link:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def listen(self, upstream: str, back: bool = False) -> str:
        """Returns the host:port that leads across the link to the server at host:port `upstream`.

        `back`: for callers at the far end of a server at the near end.
        """
        return upstream

    async def set(self, settings: LinkSettings) -> None:
        """Changes the settings, also for open connections."""
        self.settings = settings

    async def overhead(self, samples: int = OVERHEAD_SAMPLES) -> LinkOverhead:
        """Measures what the link adds to its settings. Takes 0.3 s or 28 round trips, whichever is longer."""
        if self._echoes is None:
            plain = await self._stack.enter_async_context(Echo())
            self._echoes = plain.address, await self.listen(plain.address)
        return await asyncio.to_thread(measure_overhead, *self._echoes, self.settings.with_headers(), samples)


class DelayLink(Link):
    """Emulates a link with the TCP proxy `tandem.comparison.links.delay_proxy` on 127.0.0.1.

    Every method raises RuntimeError if the proxy has exited.
    """

    def __init__(self) -> None:
        super().__init__()
        self._proxy = LineProcess("tandem.comparison.links.delay_proxy")

    async def __aenter__(self) -> DelayLink:
        self._stack.push_async_callback(self._proxy.stop)
        await self._proxy.start()
        return self

    async def listen(self, upstream: str, back: bool = False) -> str:
        """Returns the address on 127.0.0.1 that leads to `upstream`. Raises ValueError if that is not an address."""
        way = "listen-back" if back else "listen"
        return f"127.0.0.1:{await self._proxy.ask(f'{way} {upstream}')}"

    async def set(self, settings: LinkSettings) -> None:
        """Changes the settings, also for open connections; data in flight keeps its due time and its order."""
        bandwidth = "none" if settings.bandwidth_mbps is None else f"{settings.bandwidth_mbps!r}"
        await self._proxy.ask(f"set {settings.rtt_ms or 0.0!r} {bandwidth} {json.dumps(asdict(settings.but))}")
        self.settings = settings
