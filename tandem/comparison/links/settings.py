"""What a link is set to, and what that means for a message. The standard library alone."""

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
"""Ethernet, IPv4 and TCP with timestamps, around every segment: they count against the bandwidth, as with netem."""
SMALL_BYTES = 64
"""A message whose round trip is measured."""


def wire_bits(size: int) -> int:
    """What `size` bytes are with their headers."""
    return 8 * (size + HEADER_BYTES * -(-size // SEGMENT_BYTES))


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Round-trip time in milliseconds, half of it each way; megabits (10^6) a second each way, None for no limit.

    All connections share the bandwidth, and TCP's headers count, as with netem: 66 bytes around every 1448.
    Raises ValueError in one line that names the flag.
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
        """Seconds that an idle link with these settings takes for a request and its reply, TCP's headers included."""
        bits = wire_bits(up_bytes) + wire_bits(down_bytes)
        return self.rtt_ms / 1000 + (bits / (self.bandwidth_mbps * 1e6) if self.bandwidth_mbps else 0.0)
