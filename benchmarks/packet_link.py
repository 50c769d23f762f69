"""Replaces netem on kernels without it: delays packets in user space, between two TUN devices."""

from __future__ import annotations

from tandem.comparison.links.line_process import LineProcess
from tandem.comparison.links.netns import NetnsLink, must
from tandem.comparison.links.settings import LinkSettings


class PacketLink(NetnsLink):
    """NetnsLink with TUN devices in place of the veth pair and `benchmarks.packet_delay` in place of netem.

    TCP is the kernel's, as over netem. Needs root, iproute2 and /dev/net/tun; entering it raises ValueError or
    RuntimeError without.
    """

    def __init__(self) -> None:
        super().__init__()
        self._delay = LineProcess("benchmarks.packet_delay", self._near, self._far)

    async def _join(self) -> None:
        self._stack.push_async_callback(self._delay.stop)
        await self._delay.start()
        await self._delay.read()
        for device in (self._near, self._far):  # room for a burst of a whole congestion window
            await must("ip", "link", "set", device, "txqueuelen", "10000")
        await must("ip", "link", "set", self._far, "netns", self._namespace)

    async def set(self, settings: LinkSettings) -> None:
        """Changes the settings; packets in flight keep their due time and their order."""
        bandwidth = "none" if settings.bandwidth_mbps is None else f"{settings.bandwidth_mbps!r}"
        await self._delay.ask(f"set {settings.rtt_ms!r} {bandwidth}")
        self.settings = settings
