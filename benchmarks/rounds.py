"""Compares measured TPOT of fused rounds with their components: (k t_d + t_v) / mean acceptance length."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.figures import Sample


@dataclass(frozen=True, slots=True)
class RoundCheck:
    """One request: ms of a round's parts, and what follows for a token, beside what was measured at the client.

    The mean acceptance length is that of the rounds after the first, whose tokens are those that TPOT is measured over.
    """

    prompt: str
    draft_ms: float
    verify_ms: float
    acceptance_length: float
    measured_ms: float

    @property
    def expected_ms(self) -> float:
        return (self.draft_ms + self.verify_ms) / self.acceptance_length

    @property
    def ratio(self) -> float:
        """Measured over computed time; above 1 a round takes longer than its components."""
        return self.measured_ms / self.expected_ms


def check_rounds(samples: Iterable[Sample], contender: str) -> list[RoundCheck]:
    """Returns one result for every request of `contender` with more than one round."""
    found: list[RoundCheck] = []
    for sample in samples:
        stats, measured = sample.stats, sample.ms_per_later_token
        if sample.contender != contender or stats is None or stats.rounds < 2 or measured is None:
            continue
        length = (len(sample.token_ids) - sample.first_tokens) / (stats.rounds - 1)
        draft, verify = (1000 * seconds / stats.rounds for seconds in (stats.draft_seconds, stats.verify_seconds))
        found.append(RoundCheck(sample.prompt, draft, verify, length, measured))
    return found


def median_ratio(checks: Iterable[RoundCheck]) -> float | None:
    """Returns the median over all requests; None without requests."""
    values = [check.ratio for check in checks]
    return statistics.median(values) if values else None
