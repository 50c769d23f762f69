"""The queue of a recorded link, computed offline opportunity by opportunity: what replays are compared with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from random import Random

from tandem.comparison.links.link_settings import IP_TCP_BYTES, PACKET_BYTES


def opportunities(times: Sequence[int]) -> Iterator[float]:
    """The seconds of all opportunities; the trace starts again after its last one."""
    for lap in itertools.count():
        yield from ((lap * times[-1] + each) / 1000 for each in times)


def departures(times: Sequence[int], sent: Sequence[tuple[float, int]]) -> list[float]:
    """When the last byte of each segment leaves; `sent`: seconds and payload bytes, in order.

    At each opportunity, 1,500 bytes leave of what is queued by then, first in, first out.
    """
    left = [size + IP_TCP_BYTES for _, size in sent]
    gone: list[float] = []
    for now in opportunities(times):
        room = PACKET_BYTES
        while len(gone) < len(sent) and sent[len(gone)][0] <= now and room:
            first = len(gone)
            taken = min(room, left[first])
            room -= taken
            left[first] -= taken
            if left[first]:
                break
            gone.append(now)
        if len(gone) == len(sent):
            return gone
    raise AssertionError("opportunities do not end")


def generated(noise: Random, seconds: float = 8, mbps: float = 4) -> list[int]:
    """A trace as a phone might record it: a rate that wanders, with outages."""
    times: list[int] = []
    at, rate = 0.0, mbps
    while at < 1000 * seconds:
        rate = min(4 * mbps, max(mbps / 10, rate * noise.uniform(0.9, 1.12)))
        at += noise.expovariate(rate * 1e6 / 8 / PACKET_BYTES / 1000)
        if noise.random() < 0.001:
            at += noise.uniform(100, 2000)
        times.append(round(at))
    return times
