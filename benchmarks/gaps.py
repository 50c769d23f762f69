"""Measures the gaps between a request's chunks while new requests' prompts are processed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.contenders import Answered, Ours
from benchmarks.figures import quantile


@dataclass(frozen=True, slots=True)
class Gaps:
    """Milliseconds between the chunks of a request."""

    count: int
    p50: float
    p99: float
    largest: float


@dataclass(frozen=True, slots=True)
class Stall:
    """The same request without and with newcomers; `chunk`: ms of one prefill chunk, the mean of a newcomer's whole
    ones, alone on the server: later ones attend to all before them."""

    without: Gaps
    beside: Gaps
    newcomers: int
    newcomer_tokens: int
    chunk: float
    chunk_tokens: int
    same_tokens: bool

    @property
    def chunks(self) -> float:
        """The increase of the p99 gap by new requests, in prefill chunks."""
        return (self.beside.p99 - self.without.p99) / self.chunk


def gaps(answers: Iterable[Answered]) -> Gaps:
    """Returns the gaps before all chunks after each request's first."""
    found = [1000 * (b - a) for answered in answers for a, b in itertools.pairwise(answered.came)]
    return Gaps(len(found), quantile(found, 0.5), quantile(found, 0.99), max(found))


async def measure_stall(
    server: Ours,
    running: Sequence[int],
    newcomer: Sequence[int],
    max_new_tokens: int,
    at_once: int,
    runs: int,
    chunk_tokens: int,
) -> Stall:
    """Keeps `at_once` new requests running, each replaced by the next once it has its one token."""
    whole = (len(newcomer) - 1) // chunk_tokens
    prefill = await _prefill(server, newcomer, whole * chunk_tokens)
    without = [await server.answer(running, max_new_tokens) for _ in range(runs)]
    beside: list[Answered] = []
    arrived = 0
    for _ in range(runs):
        coming = [asyncio.ensure_future(_keep_coming(server, newcomer)) for _ in range(at_once)]
        try:
            beside.append(await server.answer(running, max_new_tokens))
        finally:
            for one in coming:
                one.cancel()
            arrived += sum(await asyncio.gather(*coming))
    return Stall(
        gaps(without),
        gaps(beside),
        arrived,
        len(newcomer),
        prefill / whole,
        chunk_tokens,
        {a.token_ids for a in beside} == {a.token_ids for a in without},
    )


async def _prefill(server: Ours, newcomer: Sequence[int], tokens: int) -> float:
    """Returns the milliseconds to process a prompt alone; ignores the first of six."""
    answers = [await server.answer(newcomer[: tokens + 1], 1) for _ in range(6)]
    return 1000 * statistics.median(answered.stats.prefill_seconds for answered in answers[1:] if answered.stats)


async def _keep_coming(server: Ours, newcomer: Sequence[int]) -> int:
    """Returns how many had their token when this was cancelled."""
    count = 0
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            await server.answer(newcomer, 1)
            count += 1
    return count
