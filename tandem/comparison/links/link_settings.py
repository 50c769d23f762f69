"""Link settings, the round trips that follow from them, and links recorded in Mahimahi's format.

Each line of a trace is an ascending millisecond in which 1,500 bytes may leave; unused opportunities are lost, and the
trace repeats. Standard library only.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TRACE = "trace:"
LINK_KINDS = ("emulated", f"{TRACE}UP,DOWN")

MAX_RTT_MS = 10_000.0
MAX_JITTER_MS = 10_000.0
MIN_MBPS, MAX_MBPS = 0.01, 100_000.0
SEGMENT_BYTES = 1448
HEADER_BYTES = 66  # Ethernet, IPv4 and TCP headers per segment; they count against the bandwidth
PACKET_BYTES = 1500  # sent at one opportunity of a trace, IP and TCP headers included
IP_TCP_BYTES = 52  # headers with TCP's timestamps; a segment of 1,448 bytes fills an opportunity
SMALL_BYTES = 64  # of a message whose round trip is measured


def wire_bits(size: int) -> int:
    """Returns the bits on the wire of `size` payload bytes."""
    return 8 * (size + HEADER_BYTES * -(-size // SEGMENT_BYTES))


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """A link, shared by all connections. Up is from the draft's side to the target's."""

    rtt_ms: float | None = None  # None: no link is emulated
    bandwidth_mbps: float | None = None  # 10^6 bits per second each way; None: unlimited
    up_mbps: float | None = None  # None: as down
    jitter_ms: float = 0.0  # largest random delay of a segment, each way
    trace_up: str = ""  # files of recorded links, in place of a bandwidth
    trace_down: str = ""
    trace_from: float = 0.0  # share of the traces at which they begin

    def check(self) -> None:
        """Reads the traces. Raises a one-line ValueError that names the flag."""
        for flag, value, least, most in (
            ("rtt-ms", self.rtt_ms, 0, MAX_RTT_MS),
            ("bandwidth-mbps", self.bandwidth_mbps, MIN_MBPS, MAX_MBPS),
            ("up-mbps", self.up_mbps, MIN_MBPS, MAX_MBPS),
            ("jitter-ms", self.jitter_ms, 0, MAX_JITTER_MS),
            ("trace-from", self.trace_from, 0, 1),
        ):
            if value is not None and not (math.isfinite(value) and least <= value <= most):
                raise ValueError(f"{flag}: {value:g} is not between {least:g} and {most:g}")
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
        if self.rtt_ms is None:
            return "not emulated"
        parts = (
            f"RTT {self.rtt_ms:g} ms",
            self.bandwidth_mbps and f"{self.bandwidth_mbps:g} Mbit/s",
            self.recorded and f"recorded {self.recorded}",
            self.up_mbps and f"{self.up_mbps:g} Mbit/s up",
            self.jitter_ms and f"jitter {self.jitter_ms:g} ms",
        )
        return ", ".join(part for part in parts if part)

    @property
    def seconds(self) -> float:
        return (self.rtt_ms or 0.0) / 1000

    @property
    def rates(self) -> tuple[float | None, float | None]:
        """The bandwidths up and down, in Mbit/s."""
        return self.up_mbps or self.bandwidth_mbps, self.bandwidth_mbps

    def small_round_trip(self) -> float:
        """Returns the seconds of a small message and its reply on an idle link."""
        sending = sum(wire_bits(SMALL_BYTES) / (rate * 1e6) for rate in self.rates if rate is not None)
        return self.seconds + self.jitter_ms / 1000 + sending  # half of the most jitter each way, on average


def traces_named(link: str) -> tuple[str, str]:
    """Returns the absolute paths of `trace:UP,DOWN`. Raises ValueError."""
    up, comma, down = link.removeprefix(TRACE).partition(",")
    if not (up and comma and down):
        raise ValueError(f"link: {link!r} is not trace:UP,DOWN, two files")
    return str(Path(up).resolve()), str(Path(down).resolve())


def read_trace(path: str) -> tuple[int, ...]:
    """Returns the milliseconds of a trace. Raises a one-line ValueError."""
    try:
        times = tuple(map(int, Path(path).read_text(encoding="ascii").split()))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "each line is to be a whole number of milliseconds"
        raise ValueError(f"link: trace {path}: {why}") from None
    if not times or times[-1] <= 0 or times[0] < 0:
        raise ValueError(f"link: trace {path}: it does not end after 0 ms")
    if any(later < earlier for earlier, later in itertools.pairwise(times)):
        raise ValueError(f"link: trace {path}: its times fall")
    return times


class TracedLink:
    """One direction of a recorded link that begins at `began` (seconds)."""

    def __init__(self, times: Sequence[int], began: float) -> None:
        self._times, self._began = times, began
        self._at, self._left = 0, PACKET_BYTES

    def leaves(self, now: float, size: int) -> float:
        """Returns when the last of `size` bytes sent at `now` leaves, after all earlier ones."""
        since = 1000 * (now - self._began)
        if self._time(self._at) < since:
            lap, within = divmod(since, self._times[-1])
            self._at, self._left = int(lap) * len(self._times) + bisect_left(self._times, within), PACKET_BYTES
        while size > self._left:
            size -= self._left
            self._at, self._left = self._at + 1, PACKET_BYTES
        self._left -= size
        return self._began + self._time(self._at) / 1000

    def _time(self, at: int) -> int:
        lap, within = divmod(at, len(self._times))
        return lap * self._times[-1] + self._times[within]
