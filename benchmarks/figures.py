"""Computes medians and ratios from samples."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from tandem.speculation.types import SpeculationStats


@dataclass(frozen=True, slots=True)
class Sample:
    """One request, answered by one contender. `first_seconds`: until its first `first_tokens` tokens had come.

    `stats`: what the server said of it, where it is ours.
    """

    contender: str
    prompt: str
    kind: str
    run: int
    token_ids: tuple[int, ...]
    seconds: float
    first_seconds: float = 0.0
    first_tokens: int = 0
    stats: SpeculationStats | None = None

    @property
    def ms_per_token(self) -> float:
        """The end-to-end time per token, including prompt processing."""
        return 1000 * self.seconds / len(self.token_ids)

    @property
    def ms_per_later_token(self) -> float | None:
        """The time per token from the first tokens to the end."""
        later = len(self.token_ids) - self.first_tokens
        return 1000 * (self.seconds - self.first_seconds) / later if later else None


@dataclass(frozen=True, slots=True)
class Pairing:
    """Two contenders to compare. `kinds` None: all kinds of prompts. `ours` is expected to be faster."""

    title: str
    ours: str
    theirs: str
    kinds: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Ratio:
    """A pairing's outcome. `speedup`: the median over requests of theirs over ours, above 1 where ours is faster:
    a request's two times were taken close together, where a machine's speed drifts and prompts differ.

    `faster` counts the requests (prompt and run) in which ours took less time, `total` those that both answered.
    """

    pairing: Pairing
    ours_ms: float
    theirs_ms: float
    speedup: float
    faster: int
    total: int


Figure = Callable[[Sample], float | None]
"""Returns the times per token in ms of the samples that have one."""


def end_to_end(sample: Sample) -> float:
    """Prompt processing included."""
    return sample.ms_per_token


def decoding(sample: Sample) -> float | None:
    """Without the first tokens."""
    return sample.ms_per_later_token


def ratios(samples: Iterable[Sample], pairings: Iterable[Pairing], figure: Figure = end_to_end) -> list[Ratio]:
    """Returns a ratio for every pairing with shared requests, as medians over those."""
    by_contender: dict[str, dict[tuple[str, int], Sample]] = {}
    for sample in samples:
        by_contender.setdefault(sample.contender, {})[sample.prompt, sample.run] = sample
    found = (
        _ratio(pairing, by_contender.get(pairing.ours, {}), by_contender.get(pairing.theirs, {}), figure)
        for pairing in pairings
    )
    return [ratio for ratio in found if ratio]


def _ratio(
    pairing: Pairing,
    ours: dict[tuple[str, int], Sample],
    theirs: dict[tuple[str, int], Sample],
    figure: Figure,
) -> Ratio | None:
    pairs = [
        (mine, other)
        for request, sample in ours.items()
        if request in theirs and (pairing.kinds is None or sample.kind in pairing.kinds)
        if (mine := figure(sample)) is not None and (other := figure(theirs[request])) is not None
    ]
    if not pairs:
        return None
    return Ratio(
        pairing,
        statistics.median(mine for mine, _ in pairs),
        statistics.median(other for _, other in pairs),
        statistics.median(other / mine for mine, other in pairs),
        sum(mine < other for mine, other in pairs),
        len(pairs),
    )


@dataclass(frozen=True, slots=True)
class Agreement:
    """How many (`count`) of the `total` shared requests have the same tokens; `parted` names the others."""

    count: int
    total: int
    parted: tuple[str, ...]


def agreement(samples: Iterable[Sample], contender: str, reference: str) -> Agreement:
    """Compares a contender's tokens with the reference's."""
    samples = list(samples)
    expected = {(s.prompt, s.run): s.token_ids for s in samples if s.contender == reference}
    compared = [s for s in samples if s.contender == contender and (s.prompt, s.run) in expected]
    parted = tuple(
        f"{s.prompt} at token {_parting(s.token_ids, expected[s.prompt, s.run])}"
        for s in compared
        if s.token_ids != expected[s.prompt, s.run]
    )
    return Agreement(len(compared) - len(parted), len(compared), parted)


@dataclass(frozen=True, slots=True)
class Identity:
    """How much of a reference's output a contender reproduces.

    `same`: of `requests`, those with equal tokens; `share`: of all tokens, those before the first difference.
    """

    same: int
    requests: int
    share: float


def identity(samples: Iterable[Sample], contender: str, reference: str, ends: Collection[int]) -> Identity | None:
    """Compares the tokens of shared requests, up to the reference's first end of sequence: some peers give none.

    Returns None if there are no shared requests.
    """
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
