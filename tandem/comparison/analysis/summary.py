"""Summarizes records by architecture and workload.

Speedup = mean TPOT of the baseline / mean TPOT, over the (prompt, run) pairs that both completed with two tokens or
more. Acceptance rate = accepted / drafted; mean acceptance length = committed tokens / rounds, the target's included.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tandem.comparison.measuring.distributions import DISTRIBUTIONS, MetricDistribution, distribution, ratio
from tandem.comparison.measuring.identity import TokenIdentity, identity
from tandem.comparison.measuring.records import CAUSES, Measurement, Record
from tandem.speculation.types import rounds_by_length

FIELDS = {"number_output_tokens": "output_tokens"}  # of a measurement, by LLMPerf's names
Interval = tuple[float, float]
ALIKE = 1.05  # ratios within this factor of 1 are equal for any decision
CLOSE = 1.03  # without an interval, figures within this factor are equal

# 97.5 % points of t with 1, 2, ... degrees of freedom; `_student` approximates the rest
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def paired_interval(numerators: Sequence[float], denominators: Sequence[float]) -> Interval | None:
    """Returns the 95 % interval of sum(numerators) / sum(denominators); None for a single prompt.

    Student's t on the logarithm of the ratio (delta method): a bootstrap is too narrow with few prompts.
    """
    above, below = np.asarray(numerators, float), np.asarray(denominators, float)
    units = len(above)
    if units < 2 or not (above.sum() > 0 and below.sum() > 0):
        return None
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        apart = above / above.mean() - below / below.mean()
        error = _student(units - 1) * float(np.sqrt((apart**2).sum() / units / (units - 1)))
        middle = float(above.sum() / below.sum())
    if not (0 < middle < math.inf and error < 700):  # exp(700) is still a number
        return None
    low, high = middle * math.exp(-error), middle * math.exp(error)
    return (low, high) if math.isfinite(high) else None


def _student(freedom: int) -> float:
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    z = 1.95996
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def completed(records: Iterable[Record]) -> list[Measurement]:
    return [record.measurement for record in records if record.measurement]


@dataclass(frozen=True, slots=True)
class DraftFigures:
    """Drafts over all requests, and the steps of a target that never waits."""

    rounds: int
    drafted: int
    accepted: int
    rate: float | None
    mean_length: float | None
    drafted_by: Mapping[str, int]  # by proposer
    accepted_by: Mapping[str, int]
    rounds_by_length: tuple[int, ...]
    run_steps: int  # 0: the target waited
    drafted_steps: int
    wasted_steps: int
    unverified_drafts: int  # draft tokens that no step verified

    @property
    def proposing(self) -> float | None:
        """The share of rounds with a draft."""
        return ratio(self.rounds - self.rounds_by_length[0], self.rounds) if self.rounds_by_length else None


def acceptance(measurements: Sequence[Measurement]) -> DraftFigures:
    rounds = sum(m.rounds for m in measurements)
    drafted = sum(m.drafted for m in measurements)
    accepted = sum(m.accepted for m in measurements)
    by_position = itertools.zip_longest(*(m.drafted_per_position for m in measurements), fillvalue=0)
    drafted_at = list(map(sum, by_position))
    running = [m for m in measurements if m.run_steps]
    return DraftFigures(
        rounds,
        drafted,
        accepted,
        rate=ratio(accepted, drafted),
        mean_length=ratio(sum(m.output_tokens for m in measurements), rounds),
        drafted_by=sum_counts(m.drafted_by for m in measurements),
        accepted_by=sum_counts(m.accepted_by for m in measurements),
        rounds_by_length=tuple(rounds_by_length(rounds, drafted_at)) if sum(drafted_at) == drafted else (),
        run_steps=sum(m.run_steps for m in running),
        drafted_steps=sum(m.drafted_per_position[0] for m in running if m.drafted_per_position),
        wasted_steps=sum(m.wasted_steps for m in running),
        unverified_drafts=sum(m.stale_drafts for m in running),
    )


def sum_counts(per_request: Iterable[Mapping[str, int]]) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for counts in per_request:
        totals.update(counts)
    return dict(sorted(totals.items()))


def milliseconds_per_token(measurements: Sequence[Measurement]) -> dict[str, float | None]:
    """Returns end-to-end milliseconds per output token, by cause; overlapping causes are scaled to add up."""
    tokens, totals = sum(m.output_tokens for m in measurements), dict.fromkeys(CAUSES, 0.0)
    for m in measurements:
        seconds = {cause: getattr(m.seconds_by_cause, cause) for cause in CAUSES}
        share = min(1.0, ratio(m.end_to_end_latency_s, sum(seconds.values())) or 1.0)
        for cause in CAUSES:
            totals[cause] += share * seconds[cause]
    return {cause: ratio(1000 * seconds, tokens) for cause, seconds in totals.items()}


@dataclass(frozen=True, slots=True)
class Speedup:
    """How many times as fast as `over`."""

    over: str
    ratio: float | None
    interval: Interval | None = None  # 95 %, paired by prompt

    @property
    def tied(self) -> bool:
        if self.interval is None:
            return self.ratio is None or self.ratio < CLOSE
        return self.interval[0] <= 1

    @property
    def alike(self) -> bool:
        """Whether the two are equal for any decision."""
        if self.interval is None:
            return self.ratio is not None and self.ratio < CLOSE
        return alike(self.interval)


def alike(interval: Interval) -> bool:
    return interval[0] >= 1 / ALIKE and interval[1] <= ALIKE


def speedup(records: Iterable[Record], baseline: Iterable[Record], over: str) -> Speedup:
    of_baseline = {(r.prompt, r.run): r.measurement for r in baseline}
    pairs = [
        (record.prompt, other.tpot_s, own.tpot_s)
        for record in records
        if (own := record.measurement) and (other := of_baseline.get((record.prompt, record.run)))
        if own.tpot_s is not None and other.tpot_s is not None
    ]
    theirs, ours = _sums_by_prompt(pairs)
    return Speedup(over, ratio(sum(theirs), sum(ours)), paired_interval(theirs, ours))


def _sums_by_prompt(terms: Iterable[tuple[str, float, float]]) -> tuple[list[float], list[float]]:
    """Adds up (prompt, numerator, denominator) by prompt."""
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for prompt, above, below in terms:
        sums[prompt][0] += above
        sums[prompt][1] += below
    return [above for above, _ in sums.values()], [below for _, below in sums.values()]


@dataclass(frozen=True, slots=True)
class Summary:
    """An architecture under a condition, or on one of its workloads; figures of a load are named as LLMPerf's."""

    architecture: str
    requests: int
    failed: int
    distributions: Mapping[str, MetricDistribution]  # by LLMPerf's names
    tpot_interval: Interval | None
    output_throughput_token_per_s: float | None
    acceptance: DraftFigures
    acceptance_interval: Interval | None
    bytes_up_per_token: float | None
    bytes_down_per_token: float | None
    milliseconds_per_token: Mapping[str, float | None]
    overlapping: int  # requests whose causes add up to more than their time
    speedup: Speedup
    identical: TokenIdentity | None
    error_code_frequency: Mapping[str, int]
    # under a load, over the time from the first request sent to the last one ended; tokens are of completed requests
    num_completed_requests_per_minute: float | None
    mean_output_throughput_token_per_s: float | None
    workloads: Mapping[str, Summary]

    @property
    def tpot_s(self) -> float | None:
        return self.distributions["tpot_s"].mean


def summarize(
    name: str,
    records: Sequence[Record],
    baseline: str | None,
    plain: Sequence[Record] = (),
    traces: Mapping[str, Measurement] | None = None,
    by_workload: bool = True,
) -> Summary:
    """Summarizes records of one condition. `plain`: the outputs that others should equal, if any."""
    own = [record for record in records if record.architecture == name]
    others = [record for record in records if record.architecture == baseline]
    done = completed(own)
    tokens = sum(m.output_tokens for m in done)
    accepted = ((r.prompt, m.accepted, m.drafted) for r in own if (m := r.measurement))
    tpots = ((r.prompt, m.tpot_s, 1) for r in own if (m := r.measurement) and m.tpot_s is not None)
    sent, ended = ([at for r in own if (at := getattr(r, field)) is not None] for field in ("sent_s", "ended_s"))
    seconds = max(ended, default=0.0) - min(sent, default=0.0)
    kinds: defaultdict[str, list[Record]] = defaultdict(list)
    for record in records if by_workload and own else ():
        kinds[record.workload].append(record)
    return Summary(
        architecture=name,
        requests=len(own),
        failed=len(own) - len(done),
        distributions={
            metric: distribution(getattr(m, FIELDS.get(metric, metric)) for m in done) for metric in DISTRIBUTIONS
        },
        tpot_interval=paired_interval(*_sums_by_prompt(tpots)),
        output_throughput_token_per_s=ratio(tokens, sum(m.end_to_end_latency_s for m in done)),
        acceptance=acceptance(done),
        acceptance_interval=paired_interval(*_sums_by_prompt(accepted)),
        bytes_up_per_token=ratio(sum(m.bytes_up for m in done), tokens),
        bytes_down_per_token=ratio(sum(m.bytes_down for m in done), tokens),
        milliseconds_per_token=milliseconds_per_token(done),
        overlapping=sum(m.other_clamped for m in done),
        speedup=speedup(own, others, baseline or ""),
        identical=identity(own, plain, traces) if plain else None,
        error_code_frequency=Counter(record.error.code for record in own if record.error),
        num_completed_requests_per_minute=ratio(60 * len(done), seconds),
        mean_output_throughput_token_per_s=ratio(tokens, seconds),
        workloads={kind: summarize(name, of, baseline, plain, traces, False) for kind, of in kinds.items()},
    )
