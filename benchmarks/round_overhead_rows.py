"""A row of benchmarks/round_overhead.py: the time of one part of a round, and how it was found."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.figures import quantile
from tandem.speculation.types import Request

PROMPT_TOKENS = 64
SESSION_ROUNDS = 50
"""Rounds per session, so that contexts stay short."""
WARM_UP_ROUNDS = 20
SEQUENCE_LENGTH = 512
GREEDY = Request()

DIRECT, DIFFERENCE = "direct", "difference"


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table, in milliseconds. `how`: timed as it is, or what is left when others are taken off."""

    part: str
    p50_ms: float
    p99_ms: float | None
    how: str
    what: str = ""


def direct(part: str, seconds: Sequence[float], what: str = "") -> Row:
    return Row(part, 1000 * quantile(seconds, 0.5), 1000 * quantile(seconds, 0.99), DIRECT, what)


def difference(part: str, seconds: Sequence[float], what: str = "") -> Row:
    """Returns a row of differences, each taken within one round."""
    return Row(part, 1000 * quantile(seconds, 0.5), 1000 * quantile(seconds, 0.99), DIFFERENCE, what)


def of_medians(part: str, milliseconds: float, what: str = "") -> Row:
    """Returns a row for a difference of separately measured medians, which has no percentiles."""
    return Row(part, milliseconds, None, DIFFERENCE, what)


async def timed_call(work: Callable[[], Awaitable[Any]]) -> float:
    """Returns the seconds that `work` takes."""
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began
