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

    All connections share the bandwidth, and headers count, as in netem: 66 bytes for every 1448.
    Raises a one-line ValueError that names the flag.
    """

    rtt_ms: float = 0.0
    bandwidth_mbps: float | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rtt_ms) and 0 <= self.rtt_ms <= MAX_RTT_MS):
            raise ValueError(f"rtt-ms: {self.rtt_ms:g} is not between 0 and {MAX_RTT_MS:g}")
        if self.bandwidth_mbps is not None and not MIN_MBPS <= self.bandwidth_mbps <= MAX_MBPS:
            raise ValueError(f"bandwidth-mbps: {self.bandwidth_mbps:g} is not between {MIN_MBPS:g} and {MAX_MBPS:g}")

    def __str__(self) -> str:
        bandwidth = "" if self.bandwidth_mbps is None else f", {self.bandwidth_mbps:g} Mbit/s"
        return f"RTT {self.rtt_ms:g} ms{bandwidth}"

    def round_trip_s(self, up_bytes: int = SMALL_BYTES, down_bytes: int = SMALL_BYTES) -> float:
        """Returns the seconds that an idle link takes for a request and its reply, including TCP headers."""
        bits = wire_bits(up_bytes) + wire_bits(down_bytes)
        return self.rtt_ms / 1000 + (bits / (self.bandwidth_mbps * 1e6) if self.bandwidth_mbps else 0.0)
