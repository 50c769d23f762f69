"""Loads: concurrency or arrival rate, and lengths of requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

MAX_CONCURRENCY = 1000
MAX_RATE = 1000.0


@dataclass(frozen=True, slots=True)
class Load:
    """One load point with either `concurrency` or `rate`."""

    requests: int
    concurrency: int | None = None  # users in a closed loop
    rate: float | None = None  # requests per second: an open loop of Poisson arrivals

    @property
    def name(self) -> str:
        return f"concurrency {self.concurrency}" if self.rate is None else f"rate {self.rate:g}/s"

    def __str__(self) -> str:
        return f"{self.concurrency} at once" if self.rate is None else f"{self.rate:g} requests/s"


def drawn_length(random: Random, mean: int, stddev: int, most: int) -> int:
    """Draws a whole normal number from 1 to `most`, repeating draws outside, as LLMPerf does."""
    while True:
        drawn = int(random.gauss(mean, stddev))
        if 1 <= drawn <= most:
            return drawn


def arrivals(rate: float, count: int, seed: int) -> tuple[float, ...]:
    """Returns Poisson arrival times in seconds, equal for equal seeds."""
    random, at = Random(f"arrivals {seed}"), 0.0
    return tuple(at := at + random.expovariate(rate) for _ in range(count))


def check_loads(concurrency: Sequence[int], rate: Sequence[float], requests: int | None) -> None:
    """Raises a ValueError that names the flag."""
    for flag, values in (("concurrency", concurrency), ("rate", rate)):
        if len(set(values)) < len(values):
            raise ValueError(f"{flag}: a value is named twice")
    for users in concurrency:
        if not 1 <= users <= MAX_CONCURRENCY:
            raise ValueError(f"concurrency: {users} is not between 1 and {MAX_CONCURRENCY}")
    for each in rate:
        if not (math.isfinite(each) and 0 < each <= MAX_RATE):
            raise ValueError(f"rate: {each:g} is not above 0 and at most {MAX_RATE:g} requests per second")
    if requests is not None and requests < 1:
        raise ValueError(f"max-num-completed-requests: {requests} is below 1")


def check_length(which: str, mean: int | None, stddev: int, most: int) -> None:
    """Raises a ValueError that names --mean-WHICH-tokens or --stddev-WHICH-tokens."""
    if mean is None:
        if stddev:
            raise ValueError(f"stddev-{which}-tokens: is for --mean-{which}-tokens, which is not given")
        return
    if not 1 <= mean <= most:
        raise ValueError(f"mean-{which}-tokens: {mean} is not between 1 and {most}")
    if not 0 <= stddev <= mean:
        raise ValueError(f"stddev-{which}-tokens: {stddev} is not between 0 and the mean, {mean}")
