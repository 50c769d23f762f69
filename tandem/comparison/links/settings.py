"""Defines link settings and the round trip that follows from them. Uses only the standard library."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

LinkKind = Literal["emulated", "netns"]
LINK_KINDS: tuple[LinkKind, ...] = ("emulated", "netns")

MAX_RTT_MS = 10_000.0
MIN_MBPS, MAX_MBPS = 0.01, 100_000.0
SEGMENT_BYTES = 1448
HEADER_BYTES = 66
"""Bytes of Ethernet, IPv4 and TCP headers per segment; they count against the bandwidth, as in netem."""
SMALL_BYTES = 64
"""The size of a message whose round trip is measured."""


def wire_bits(size: int) -> int:
    """Returns the bits on the wire of `size` payload bytes."""
    return 8 * (size + HEADER_BYTES * -(-size // SEGMENT_BYTES))


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """The round-trip time in milliseconds and the bandwidth in 10^6 bits per second each way (None: unlimited).

    All connections share the bandwidth. `rtt_ms` None: no link is emulated.
    """

    rtt_ms: float | None = None
    bandwidth_mbps: float | None = None

    def check(self) -> None:
        """Raises a one-line ValueError that names the flag if no link can be emulated so."""
        if self.rtt_ms is not None and not (math.isfinite(self.rtt_ms) and 0 <= self.rtt_ms <= MAX_RTT_MS):
            raise ValueError(f"rtt-ms: {self.rtt_ms:g} is not between 0 and {MAX_RTT_MS:g}")
        if self.bandwidth_mbps is not None and not MIN_MBPS <= self.bandwidth_mbps <= MAX_MBPS:
            raise ValueError(f"bandwidth-mbps: {self.bandwidth_mbps:g} is not between {MIN_MBPS:g} and {MAX_MBPS:g}")

    def __str__(self) -> str:
        bandwidth = "" if self.bandwidth_mbps is None else f", {self.bandwidth_mbps:g} Mbit/s"
        return "not emulated" if self.rtt_ms is None else f"RTT {self.rtt_ms:g} ms{bandwidth}"

    @property
    def seconds(self) -> float:
        return (self.rtt_ms or 0.0) / 1000

    def transfer(self, payload_bytes: float) -> float:
        """Returns the seconds for which a payload of this size occupies the link."""
        return 0.0 if self.bandwidth_mbps is None else payload_bytes * 8 / (self.bandwidth_mbps * 1e6)

    def round_trip(self, payload_bytes: float) -> float:
        """Returns the seconds that a call and its reply, `payload_bytes` together, take on the link."""
        return self.seconds + self.transfer(payload_bytes)

    def with_headers(self, up_bytes: int = SMALL_BYTES, down_bytes: int = SMALL_BYTES) -> float:
        """The same for an idle link and with TCP headers, as in netem: 66 bytes for every 1448."""
        return self.round_trip((wire_bits(up_bytes) + wire_bits(down_bytes)) / 8)
