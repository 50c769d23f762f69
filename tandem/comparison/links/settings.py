"""Link settings and the round trips that follow from them (standard library only)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from tandem.comparison.links.trace import read_trace

TRACE = "trace:"
LINK_KINDS = ("emulated", f"{TRACE}UP,DOWN")

MAX_RTT_MS = 10_000.0
MAX_JITTER_MS = 10_000.0
MIN_MBPS, MAX_MBPS = 0.01, 100_000.0
SEGMENT_BYTES = 1448
HEADER_BYTES = 66  # Ethernet, IPv4 and TCP headers per segment; they count against the bandwidth
SMALL_BYTES = 64  # of a message whose round trip is measured


def wire_bits(size: int) -> int:
    """Returns the bits on the wire of `size` payload bytes."""
    return 8 * (size + HEADER_BYTES * -(-size // SEGMENT_BYTES))


@dataclass(frozen=True, slots=True)
class Impairments:
    """Differences from a constant, symmetric link. Up is from the draft's side to the target's."""

    up_mbps: float | None = None  # None: as down
    jitter_ms: float = 0.0  # largest random delay of a segment, each way
    trace_up: str = ""  # files of recorded links, in place of a bandwidth
    trace_down: str = ""
    trace_from: float = 0.0  # share of the traces at which they begin

    def check(self) -> None:
        """Reads the traces. Raises a one-line ValueError that names the flag."""
        for flag, value, most in (
            ("jitter-ms", self.jitter_ms, MAX_JITTER_MS),
            ("trace-from", self.trace_from, 1.0),
        ):
            _check_between(flag, value, 0, most)
        if self.up_mbps is not None:
            _check_between("up-mbps", self.up_mbps, MIN_MBPS, MAX_MBPS)
        for path in filter(None, (self.trace_up, self.trace_down)):
            read_trace(path)

    @property
    def predictable(self) -> bool:
        """Whether round trips follow from the settings."""
        return not self.trace_up

    @property
    def recorded(self) -> str:
        """The name of the recorded link, or ""."""
        paths = [Path(path) for path in (self.trace_up, self.trace_down) if path]
        alike = len(paths) == 2 and len({path.stem for path in paths}) == 1
        return paths[0].stem if alike else " and ".join(path.name for path in paths)

    def __str__(self) -> str:
        parts = (
            (bool(self.recorded), f"recorded {self.recorded}"),
            (self.up_mbps is not None, f"{self.up_mbps or 0:g} Mbit/s up"),
            (bool(self.jitter_ms), f"jitter {self.jitter_ms:g} ms"),
        )
        return ", ".join(text for shown, text in parts if shown)


STEADY = Impairments()


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """A link, shared by all connections."""

    rtt_ms: float | None = None  # None: no link is emulated
    bandwidth_mbps: float | None = None  # 10^6 bits per second each way; None: unlimited
    but: Impairments = STEADY

    def check(self) -> None:
        """Raises a one-line ValueError that names the flag."""
        if self.rtt_ms is not None:
            _check_between("rtt-ms", self.rtt_ms, 0, MAX_RTT_MS)
        if self.bandwidth_mbps is not None:
            _check_between("bandwidth-mbps", self.bandwidth_mbps, MIN_MBPS, MAX_MBPS)
        self.but.check()

    def __str__(self) -> str:
        bandwidth = "" if self.bandwidth_mbps is None else f", {self.bandwidth_mbps:g} Mbit/s"
        also = f", {self.but}" if str(self.but) else ""
        return "not emulated" if self.rtt_ms is None else f"RTT {self.rtt_ms:g} ms{bandwidth}{also}"

    @property
    def seconds(self) -> float:
        return (self.rtt_ms or 0.0) / 1000

    @property
    def rates(self) -> tuple[float | None, float | None]:
        """The bandwidths up and down, in Mbit/s."""
        return self.but.up_mbps or self.bandwidth_mbps, self.bandwidth_mbps

    def transfer(self, payload_bytes: float) -> float:
        """Returns the seconds that a payload occupies the link; half of it goes up."""
        return sum(payload_bytes / 2 * 8 / (rate * 1e6) for rate in self.rates if rate is not None)

    def round_trip(self, payload_bytes: float) -> float:
        """Returns the seconds of a call and its reply, `payload_bytes` together."""
        return self.seconds + self.transfer(payload_bytes)

    def small_round_trip(self) -> float:
        """Returns the seconds of a small message and its reply on an idle link."""
        sending = sum(wire_bits(SMALL_BYTES) / (rate * 1e6) for rate in self.rates if rate is not None)
        return self.seconds + self.but.jitter_ms / 1000 + sending  # half of the most jitter each way, on average


def traces_named(link: str) -> tuple[str, str]:
    """Returns the absolute paths of `trace:UP,DOWN`. Raises ValueError."""
    up, comma, down = link.removeprefix(TRACE).partition(",")
    if not (up and comma and down):
        raise ValueError(f"link: {link!r} is not trace:UP,DOWN, two files")
    return str(Path(up).resolve()), str(Path(down).resolve())


def _check_between(flag: str, value: float, least: float, most: float) -> None:
    if not (math.isfinite(value) and least <= value <= most):
        raise ValueError(f"{flag}: {value:g} is not between {least:g} and {most:g}")
