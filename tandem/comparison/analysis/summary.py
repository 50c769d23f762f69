"""Summarizes the records of each architecture and workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tandem.comparison.analysis import metrics
from tandem.comparison.analysis.bootstrap import Interval
from tandem.comparison.analysis.metrics import Acceptance, RanOn, SentAhead, Speedup, completed
from tandem.comparison.measuring.distributions import DISTRIBUTIONS, MetricDistribution, distribution, ratio
from tandem.comparison.measuring.identity import MarginTrace, TokenIdentity, identity
from tandem.comparison.measuring.json_form import HIDDEN, INLINE, named
from tandem.comparison.measuring.records import Record


@dataclass(frozen=True, slots=True)
class WorkloadSummary:
    """The summary of one architecture on one kind of prompt."""

    tpot_s: MetricDistribution
    acceptance: Acceptance = field(metadata=INLINE)
    speedup: Speedup = field(metadata=INLINE)
    identical: TokenIdentity | None = field(metadata=named("identical_to_autoregressive"))


@dataclass(frozen=True, slots=True)
class Summary:
    """The summary of one architecture over all its requests, with LLMPerf's names."""

    architecture: str = field(metadata=HIDDEN)
    requests: int
    failed: int
    distributions: Mapping[str, MetricDistribution] = field(metadata=INLINE)
    tpot_interval: Interval | None
    chunk_gap_s: MetricDistribution
    tokens_per_chunk: MetricDistribution
    output_throughput_token_per_s: float | None
    acceptance: Acceptance = field(metadata=INLINE)
    acceptance_interval: Interval | None
    bytes_up_per_token: float | None
    bytes_down_per_token: float | None
    milliseconds_per_token: Mapping[str, float | None]
    other_clamped: int = field(metadata=named("requests_whose_other_seconds_were_clamped_at_0"))
    speedup: Speedup = field(metadata=INLINE)
    identical: TokenIdentity | None = field(metadata=named("identical_to_autoregressive"))
    sent_ahead: SentAhead | None
    ran_on: RanOn | None
    workloads: Mapping[str, WorkloadSummary]


def summarize(
    records: Sequence[Record],
    baseline: str | None,
    autoregressive: str | None,
    traces: Mapping[str, MarginTrace] | None = None,
    names: Sequence[str] | None = None,
    plain: Sequence[Record] | None = None,
) -> list[Summary]:
    """Summarizes the records of one condition for the architectures `names` (None: all, in order of appearance).

    `baseline` names the fastest plain decoding, for speedups, and `autoregressive` the one for identical outputs; None
    if it did not run. `plain`: the outputs that others should equal; None: those of `autoregressive` in `records`.
    """
    names = list(dict.fromkeys(record.architecture for record in records)) if names is None else names
    if plain is None or autoregressive is None:
        plain = _of(records, autoregressive)
    return [_summary(name, _of(records, name), _of(records, baseline), plain, traces or {}) for name in names]


def _of(records: Sequence[Record], architecture: str | None) -> list[Record]:
    return [record for record in records if record.architecture == architecture]


def _summary(
    name: str,
    own: Sequence[Record],
    baseline: Sequence[Record],
    plain: Sequence[Record],
    traces: Mapping[str, MarginTrace],
) -> Summary:
    done = completed(own)
    tokens = sum(m.output_tokens for m in done)
    measured = {metric: "output_tokens" if metric == "number_output_tokens" else metric for metric in DISTRIBUTIONS}
    kinds: dict[str, WorkloadSummary] = {}
    for kind in dict.fromkeys(record.workload for record in own):
        of_kind = [record for record in own if record.workload == kind]
        kinds[kind] = WorkloadSummary(
            distribution(m.tpot_s for m in completed(of_kind)),
            metrics.acceptance(completed(of_kind)),
            metrics.speedup(of_kind, baseline),
            identity(of_kind, plain, traces) if plain else None,
        )
    return Summary(
        architecture=name,
        requests=len(own),
        failed=len(own) - len(done),
        distributions={metric: distribution(getattr(m, key) for m in done) for metric, key in measured.items()},
        tpot_interval=metrics.tpot_interval(own),
        chunk_gap_s=distribution(gap for m in done for gap in m.chunk_gaps_s),
        tokens_per_chunk=distribution(float(count) for m in done for count in m.chunk_tokens),
        output_throughput_token_per_s=ratio(tokens, sum(m.end_to_end_latency_s for m in done)),
        acceptance=metrics.acceptance(done),
        acceptance_interval=metrics.acceptance_interval(own),
        bytes_up_per_token=ratio(sum(m.bytes_up for m in done), tokens),
        bytes_down_per_token=ratio(sum(m.bytes_down for m in done), tokens),
        milliseconds_per_token=metrics.milliseconds_per_token(done),
        other_clamped=sum(m.other_clamped for m in done),
        speedup=metrics.speedup(own, baseline),
        identical=identity(own, plain, traces) if plain else None,
        sent_ahead=metrics.sent_ahead(done),
        ran_on=metrics.ran_on(done),
        workloads=kinds,
    )
