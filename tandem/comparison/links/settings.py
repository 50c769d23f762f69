"""Defines link settings and the round trip that follows from them. Uses only the standard library."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tandem.comparison.links.impairments import STEADY, TRACE, Impairments

LINK_KINDS = ("emulated", f"{TRACE}UP,DOWN")

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

    All connections share the bandwidth. `rtt_ms` None: no link is emulated. `but`: in what it is not constant and
    symmetric.
    """

    rtt_ms: float | None = None
    bandwidth_mbps: float | None = None
    but: Impairments = STEADY

    def check(self) -> None:
        """Raises a one-line ValueError that names the flag if no link can be emulated so."""
        if self.rtt_ms is not None and not (math.isfinite(self.rtt_ms) and 0 <= self.rtt_ms <= MAX_RTT_MS):
            raise ValueError(f"rtt-ms: {self.rtt_ms:g} is not between 0 and {MAX_RTT_MS:g}")
        if self.bandwidth_mbps is not None and not MIN_MBPS <= self.bandwidth_mbps <= MAX_MBPS:
            raise ValueError(f"bandwidth-mbps: {self.bandwidth_mbps:g} is not between {MIN_MBPS:g} and {MAX_MBPS:g}")
        if self.but.up_mbps is not None and not MIN_MBPS <= self.but.up_mbps <= MAX_MBPS:
            raise ValueError(f"up-mbps: {self.but.up_mbps:g} is not between {MIN_MBPS:g} and {MAX_MBPS:g}")
        self.but.check()

    def __str__(self) -> str:
        bandwidth = "" if self.bandwidth_mbps is None else f", {self.bandwidth_mbps:g} Mbit/s"
        also = f", {self.but}" if str(self.but) else ""
        return "not emulated" if self.rtt_ms is None else f"RTT {self.rtt_ms:g} ms{bandwidth}{also}"

    @property
    def seconds(self) -> float:
        return (self.rtt_ms or 0.0) / 1000

    def transfer(self, payload_bytes: float) -> float:
        """Returns the seconds for which a payload of this size occupies the link; half of it goes up."""
        rates = (self.but.up_mbps or self.bandwidth_mbps, self.bandwidth_mbps)
        return sum(payload_bytes / 2 * 8 / (rate * 1e6) for rate in rates if rate is not None)

    def round_trip(self, payload_bytes: float) -> float:
        """Returns the seconds that a call and its reply, `payload_bytes` together, take on the link."""
        return self.seconds + self.transfer(payload_bytes)

    def with_headers(self, up_bytes: int = SMALL_BYTES, down_bytes: int = SMALL_BYTES) -> float:
        """The same for an idle link and with TCP headers, as in netem: 66 bytes for every 1448."""
        up, down = self.but.up_mbps or self.bandwidth_mbps, self.bandwidth_mbps
        rated = ((up, wire_bits(up_bytes)), (down, wire_bits(down_bytes)))
        sending = sum(bits / (rate * 1e6) for rate, bits in rated if rate is not None)
        return self.seconds + self.but.jitter_ms / 1000 + sending  # half of the most jitter each way, on average
