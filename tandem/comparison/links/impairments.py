"""Defines what an emulated link may have besides a constant delay and rate. Uses only the standard library.

Loss is what TCP makes of it, since gRPC runs over TCP: no byte is missing, but what was lost comes late, and all
behind it on the same connection waits. A lost segment comes RTT x 1.25 after the next one of its connection arrives,
whose acknowledgement tells of the loss (RACK, RFC 8985, with a quarter of the round trip for reordering). Without a
next one it comes after a timeout of RTT + 200 ms, Linux's least, which doubles with each further loss of the segment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tandem.comparison.links.trace import read_trace

LEAST_TIMEOUT_S = 0.2
REPAIR_ROUND_TRIPS = 1.25
MAX_LOSS = 0.5
TRACE = "trace:"


@dataclass(frozen=True, slots=True)
class Impairments:
    """Up is from the draft's side to the target's.

    up_share: the share of the round trip on the way up. up_mbps: the bandwidth up, if it is not that down. jitter_ms: a
    segment is delayed by up to so much more each way, at random. loss: the share of segments that are lost. trace_up,
    trace_down: files of recorded links, in place of a bandwidth. trace_from: the share of their lengths at which they
    begin.
    """

    up_share: float = 0.5
    up_mbps: float | None = None
    jitter_ms: float = 0.0
    loss: float = 0.0
    trace_up: str = ""
    trace_down: str = ""
    trace_from: float = 0.0

    def check(self) -> None:
        """Raises a one-line ValueError that names the flag if no link can be emulated so; reads traces."""
        for flag, value, most in (
            ("up-share", self.up_share, 1.0),
            ("jitter-ms", self.jitter_ms, 10_000.0),
            ("loss", self.loss, MAX_LOSS),
            ("trace-from", self.trace_from, 1.0),
        ):
            if not (math.isfinite(value) and 0 <= value <= most):
                raise ValueError(f"{flag}: {value:g} is not between 0 and {most:g}")
        for path in filter(None, (self.trace_up, self.trace_down)):
            read_trace(path)

    @property
    def predictable(self) -> bool:
        """Whether round trips follow from the settings."""
        return not (self.loss or self.trace_up)

    @property
    def recorded(self) -> str:
        """The name of the recorded link, if it is one."""
        paths = [Path(path) for path in (self.trace_up, self.trace_down) if path]
        alike = len(paths) == 2 and len({path.stem for path in paths}) == 1
        return paths[0].stem if alike else " and ".join(path.name for path in paths)

    def __str__(self) -> str:
        parts = (
            (bool(self.recorded), f"recorded {self.recorded}"),
            (self.up_mbps is not None, f"{self.up_mbps or 0:g} Mbit/s up"),
            (self.up_share != 0.5, f"{self.up_share:.0%} of the delay up"),
            (bool(self.jitter_ms), f"jitter {self.jitter_ms:g} ms"),
            (bool(self.loss), f"loss {100 * self.loss:g} %"),
        )
        return ", ".join(text for told, text in parts if told)


STEADY = Impairments()
"""A constant and symmetric link."""


def traces_named(link: str) -> tuple[str, str]:
    """Returns the files of `trace:UP,DOWN`, as absolute paths. Raises ValueError."""
    up, comma, down = link.removeprefix(TRACE).partition(",")
    if not (up and comma and down):
        raise ValueError(f"link: {link!r} is not trace:UP,DOWN, two files")
    return str(Path(up).resolve()), str(Path(down).resolve())


class Misfortune:
    """Draws the jitter and the losses of one direction, the same ones after every `set` of the link."""

    def __init__(self, jitter_s: float, loss: float, rtt_s: float, seed: int) -> None:
        self._jitter, self._loss, self._random = jitter_s, loss, Random(seed)
        self.repair_s, self._timeout = REPAIR_ROUND_TRIPS * rtt_s, rtt_s + LEAST_TIMEOUT_S

    @property
    def by_segment(self) -> bool:
        """Whether segments fare differently, so that data is to be sent segment by segment."""
        return bool(self._jitter or self._loss)

    def jitter(self) -> float:
        return self._random.uniform(0, self._jitter) if self._jitter else 0.0

    def losses(self) -> int:
        """How many times in a row a segment is lost."""
        count = 0
        while self._loss and self._random.random() < self._loss:
            count += 1
        return count

    def timeouts(self, losses: int) -> float:
        """The seconds by which a segment comes late that is sent again after timeouts alone."""
        return self._timeout * (2**losses - 1)
