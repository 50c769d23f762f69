"""Computes metrics from records: distributions, acceptance, cost by cause, speedup.

Definitions. Percentiles interpolate linearly and stddev is that of a sample, as in LLMPerf (pandas).
Acceptance rate = accepted / drafted. Mean acceptance length = committed tokens / rounds, the target's own token
included. Mean draft length = drafted tokens / rounds. Speedup = mean TPOT of the baseline / mean TPOT of the
architecture, over the (prompt, run) pairs that both completed with at least two tokens; 2 means half the time per
token. TPOT = (E2E - TTFT) / (n - 1) excludes prompt processing and all of a first chunk's time;
`end_to_end_speedup`, the same ratio of E2E / n, excludes nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tandem.comparison.analysis.bootstrap import Interval, paired_interval, ratio_interval
from tandem.comparison.measuring.distributions import ratio
from tandem.comparison.measuring.json_form import named
from tandem.comparison.measuring.records import CAUSES, Measurement, Record
from tandem.speculation.types import rounds_by_length


def completed(records: Iterable[Record]) -> list[Measurement]:
    return [record.measurement for record in records if record.measurement]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance of drafts. Positions start at the first draft token of a round; `..._by` is by proposer."""

    rounds: int
    drafted: int
    accepted: int
    acceptance_rate: float | None
    propose_rate: float | None
    mean_acceptance_length: float | None
    mean_draft_length: float | None
    acceptance_by_position: tuple[float | None, ...]
    conditional_acceptance_by_position: tuple[float | None, ...]
    drafted_by: dict[str, int]
    accepted_by: dict[str, int]
    rounds_by_length: tuple[int, ...]


def acceptance(measurements: Sequence[Measurement]) -> Acceptance:
    rounds = sum(m.rounds for m in measurements)
    drafted = sum(m.drafted for m in measurements)
    accepted = sum(m.accepted for m in measurements)
    drafted_at = sum_positions(m.drafted_per_position for m in measurements)
    accepted_at = sum_positions(m.accepted_per_position for m in measurements)
    return Acceptance(
        rounds,
        drafted,
        accepted,
        acceptance_rate=ratio(accepted, drafted),
        propose_rate=ratio(drafted_at[0] if drafted_at else 0, rounds),
        mean_acceptance_length=ratio(sum(m.output_tokens for m in measurements), rounds),
        mean_draft_length=ratio(drafted, rounds),
        acceptance_by_position=tuple(ratio(a, d) for a, d in zip(accepted_at, drafted_at, strict=True)),
        conditional_acceptance_by_position=_conditional(accepted_at, drafted_at),
        drafted_by=sum_counts(m.drafted_by for m in measurements),
        accepted_by=sum_counts(m.accepted_by for m in measurements),
        rounds_by_length=tuple(rounds_by_length(rounds, drafted_at)) if sum(drafted_at) == drafted else (),
    )


@dataclass(frozen=True, slots=True)
class SentAhead:
    """Results of sending rounds ahead of verdicts; comparison.schema.json describes the fields."""

    guessed_rounds: int
    stale_rounds: int
    stale_drafts: int
    mean_in_flight: float
    max_in_flight: int


def sent_ahead(measurements: Sequence[Measurement]) -> SentAhead | None:
    """Summarizes rounds sent ahead; None if no architecture could have several rounds in flight."""
    by_depth = sum_positions(m.sent_by_depth for m in measurements)
    if not by_depth:
        return None
    return SentAhead(
        sum(m.guessed_rounds for m in measurements),
        sum(m.stale_rounds for m in measurements),
        sum(m.stale_drafts for m in measurements),
        sum((i + 1) * n for i, n in enumerate(by_depth)) / sum(by_depth),
        len(by_depth),
    )


@dataclass(frozen=True, slots=True)
class RanOn:
    """What a target that never waits did; comparison.schema.json describes the fields."""

    run_steps: int
    drafted_steps: int
    wasted_steps: int
    unverified_drafts: int


def ran_on(measurements: Sequence[Measurement]) -> RanOn | None:
    """Summarizes the steps of targets that did not wait; None if there were none."""
    steps = sum(m.run_steps for m in measurements)
    if not steps:
        return None
    ran = [m for m in measurements if m.run_steps]
    return RanOn(
        steps,
        sum(m.drafted_per_position[0] for m in ran if m.drafted_per_position),
        sum(m.wasted_steps for m in ran),
        sum(m.stale_drafts for m in ran),
    )


def sum_counts(per_request: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Adds up counts by name."""
    totals: Counter[str] = Counter()
    for counts in per_request:
        totals.update(counts)
    return dict(sorted(totals.items()))


def sum_positions(per_request: Iterable[Sequence[int]]) -> list[int]:
    """Adds up counts by position; shorter sequences count as 0 beyond their end."""
    totals: list[int] = []
    for counts in per_request:
        totals += [0] * (len(counts) - len(totals))
        for position, count in enumerate(counts):
            totals[position] += count
    return totals


def _conditional(accepted: Sequence[int], drafted: Sequence[int]) -> tuple[float | None, ...]:
    """Returns P(draft token i accepted | all before it accepted) for each position i.

    The denominator, the rounds with a token at i and all before it accepted, is bounded above by both counts; the
    smaller one is used. This is exact for drafts of equal length, otherwise a lower bound of the rate.
    """
    reached = [min(pair) for pair in zip([*drafted[:1], *accepted], drafted, strict=False)]
    return tuple(ratio(a, r) for a, r in zip(accepted, reached, strict=True))


def milliseconds_per_token(measurements: Sequence[Measurement]) -> dict[str, float | None]:
    """Returns the end-to-end milliseconds per output token, by cause."""
    tokens = sum(m.output_tokens for m in measurements)
    totals = {cause: sum(getattr(m.seconds_by_cause, cause) for m in measurements) for cause in CAUSES}
    return {cause: ratio(1000 * seconds, tokens) for cause, seconds in totals.items()}


@dataclass(frozen=True, slots=True)
class Speedup:
    """Speedup over the baseline from `pairs` of requests, as defined above. `interval`: 95 %, paired by prompt."""

    speedup: float | None = field(metadata=named("speedup_vs_autoregressive"))
    interval: Interval | None = field(metadata=named("speedup_interval"))
    end_to_end_speedup: float | None = field(metadata=named("end_to_end_speedup_vs_autoregressive"))
    pairs: int = field(metadata=named("speedup_pairs"))


def speedup(records: Iterable[Record], baseline: Iterable[Record]) -> Speedup:
    of_baseline = {(r.prompt, r.run): r.measurement for r in baseline}
    pairs = [
        (record.prompt, own, other)
        for record in records
        if (own := record.measurement) and (other := of_baseline.get((record.prompt, record.run)))
        if own.tpot_s is not None and other.tpot_s is not None
    ]
    theirs, ours = _sums_by_prompt((prompt, other.tpot_s or 0.0, own.tpot_s or 0.0) for prompt, own, other in pairs)
    return Speedup(
        ratio(sum(theirs), sum(ours)),
        paired_interval(theirs, ours),
        ratio(
            sum(other.end_to_end_latency_s / other.output_tokens for *_, other in pairs),
            sum(own.end_to_end_latency_s / own.output_tokens for _, own, _ in pairs),
        ),
        len(pairs),
    )


def _sums_by_prompt(terms: Iterable[tuple[str, float, float]]) -> tuple[list[float], list[float]]:
    """Adds up (prompt, numerator, denominator): one of each for every prompt."""
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for prompt, above, below in terms:
        sums[prompt][0] += above
        sums[prompt][1] += below
    return [above for above, _ in sums.values()], [below for _, below in sums.values()]


def acceptance_interval(records: Iterable[Record]) -> Interval | None:
    """Returns the 95 % interval of the acceptance rate, over prompts."""
    return ratio_interval(*_sums_by_prompt((r.prompt, m.accepted, m.drafted) for r in records if (m := r.measurement)))


def tpot_interval(records: Iterable[Record]) -> Interval | None:
    """Returns the 95 % interval of the mean TPOT, over prompts."""
    known = ((r.prompt, r.measurement.tpot_s) for r in records if r.measurement)
    return ratio_interval(*_sums_by_prompt((prompt, tpot_s, 1) for prompt, tpot_s in known if tpot_s is not None))
