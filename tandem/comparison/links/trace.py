"""Replays links recorded in Mahimahi's format; `python -m tandem.comparison.links.trace FILE...` describes them.

Each line is an ascending millisecond in which 1,500 bytes may leave; unused opportunities are lost, and the trace
repeats. Mahimahi's: `git clone --depth 1 https://github.com/ravinet/mahimahi`, traces/. Standard library only.
"""

from __future__ import annotations

import itertools
import sys
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

PACKET_BYTES = 1500  # sent at one opportunity, IP and TCP headers included
IP_TCP_BYTES = 52  # headers with TCP's timestamps; a segment of 1,448 bytes fills an opportunity


def read_trace(path: str) -> tuple[int, ...]:
    """Returns the milliseconds of a trace. Raises a one-line ValueError."""
    try:
        lines = Path(path).read_text(encoding="ascii").split()
        times = tuple(int(line) for line in lines)
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


def described(path: str) -> str:
    """Describes a trace: length, mean rate, longest outage."""
    times = read_trace(path)
    mbps = 8 * PACKET_BYTES * len(times) / times[-1] / 1000
    gap = max(later - earlier for earlier, later in itertools.pairwise((0, *times)))
    return f"{path}: {times[-1] / 1000:g} s, {mbps:.2f} Mbit/s on average, longest outage {gap} ms"


if __name__ == "__main__":
    try:
        for each in sys.argv[1:]:
            print(described(each))
    except ValueError as error:
        sys.exit(str(error))
