"""Computes medians and ratios of samples."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """One contender's answer to one request."""

    contender: str
    prompt: str
    kind: str
    run: int
    token_ids: tuple[int, ...]
    seconds: float
    first_seconds: float = 0.0  # until the first `first_tokens` had come
    first_tokens: int = 0


Figure = Callable[[Sample], float | None]  # milliseconds per token, if any


def end_to_end(sample: Sample) -> float:
    """Includes prompt processing."""
    return 1000 * sample.seconds / len(sample.token_ids)


def decoding(sample: Sample) -> float | None:
    """Returns TPOT in milliseconds, from the first chunk on; None if the answer came in one chunk."""
    later, seconds = len(sample.token_ids) - sample.first_tokens, sample.seconds - sample.first_seconds
    return 1000 * seconds / later if later and seconds > 0 else None


def speedup(samples: Iterable[Sample], ours: str, theirs: str, figure: Figure = end_to_end) -> float | None:
    """Returns the median over shared requests of their time over ours: a request's two times are close together."""
    times: dict[str, dict[tuple[str, int], float]] = {ours: {}, theirs: {}}
    for sample in samples:
        ms = figure(sample)
        if sample.contender in times and ms is not None:
            times[sample.contender][sample.prompt, sample.run] = ms
    both = times[ours].keys() & times[theirs].keys()
    return statistics.median(times[theirs][request] / times[ours][request] for request in both) if both else None


@dataclass(frozen=True, slots=True)
class Identity:
    """How much of a reference's output a contender reproduces."""

    same: int  # of `requests`, with equal tokens
    requests: int
    share: float  # of all tokens, before the first difference


def identity(samples: Iterable[Sample], contender: str, reference: str, ends: Collection[int]) -> Identity | None:
    """Compares shared requests up to the reference's first end of sequence: some peers give none."""
    samples = list(samples)
    expected = {(s.prompt, s.run): _until(s.token_ids, ends) for s in samples if s.contender == reference}
    pairs = [
        (s.token_ids[: len(wanted)], wanted)
        for s in samples
        if s.contender == contender and (wanted := expected.get((s.prompt, s.run)))
    ]
    if not pairs:
        return None
    same = sum(left == right for left, right in pairs)
    before = sum(_parting(left, right) for left, right in pairs)
    return Identity(same, len(pairs), before / sum(len(right) for _, right in pairs))


def _until(tokens: tuple[int, ...], ends: Collection[int]) -> tuple[int, ...]:
    return tuple(itertools.takewhile(lambda token: token not in ends, tokens))


def _parting(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def quantile(values: Iterable[float], q: float) -> float:
    """Returns a linearly interpolated percentile. Raises ValueError without values."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values")
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
