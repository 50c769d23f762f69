"""Pipeline depth: how many rounds to keep in flight."""

from __future__ import annotations

import enum
import math

from tandem.speculation.estimate import Estimate

# Round trip / verification below which depth stays minimal: on shared cores drafting ahead costs more than it saves
# (measured at 1 ms / 11 ms: `auto` took 1.1 to 1.2 times as long per token as stop-and-wait).
SHORT_NETWORK = 0.25


class Pipeline(enum.Enum):
    """Whether rounds overlap, or the target never waits. The values are command-line values."""

    OFF = "off"
    ON = "on"
    NEVER_WAITING = "never-waiting"
    AUTO = "auto"


class Depth:
    """Chooses the depth for one request; all requests to a target share `estimate`."""

    def __init__(self, pipeline: Pipeline, most: int, estimate: Estimate | None = None) -> None:
        if most < 1:
            raise ValueError(f"depth: at least 1 round must be in flight, not {most}")
        self._least = min(most, 2 if pipeline is Pipeline.ON else 1)
        self._most = 1 if pipeline is Pipeline.OFF else most
        self.estimate = estimate or Estimate()

    def of(self, k: int) -> int:
        """Returns how many rounds of `k` draft tokens to keep in flight."""
        times = self.estimate.times
        if k == 0:
            return 1
        if times is None or self._most == 1 or times.rtt < SHORT_NETWORK * times.verify:
            return self._least
        meanwhile = (times.rtt + times.verify) / max(1e-9, (k + 1) * times.draft)
        return max(self._least, math.floor(min(self._most, 1 + meanwhile)))
