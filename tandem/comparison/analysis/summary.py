"""Summarizes the records of each architecture and workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tandem.comparison.analysis.bootstrap import Interval
from tandem.comparison.analysis.distributions import DISTRIBUTIONS, MetricDistribution, distribution
from tandem.comparison.analysis.identity import MarginTrace, TokenIdentity, identity
from tandem.comparison.analysis.metrics import (
    Acceptance,
    RanOn,
    SentAhead,
    Speedup,
    acceptance,
    acceptance_interval,
    completed,
    milliseconds_per_token,
    ran_on,
    ratio,
    sent_ahead,
    speedup,
    tpot_interval,
)
from tandem.comparison.measuring.records import Measurement, Record


@dataclass(frozen=True, slots=True)
class References:
    """The architectures that others are compared with; None if it did not run.

    `baseline`: the fastest plain decoding, for speedups. `autoregressive`: for identical outputs.
    """

    baseline: str | None
    autoregressive: str | None


@dataclass(frozen=True, slots=True)
class WorkloadSummary:
    """The summary of one architecture on one kind of prompt."""

    tpot_s: MetricDistribution
    acceptance: Acceptance
    speedup: Speedup
    identical: TokenIdentity | None


@dataclass(frozen=True, slots=True)
class Summary:
    """The summary of one architecture over all its requests."""

    architecture: str
    requests: int
    failed: int
    distributions: Mapping[str, MetricDistribution]
    tpot_interval: Interval | None
    chunk_gap_s: MetricDistribution
    tokens_per_chunk: MetricDistribution
    output_throughput_token_per_s: float | None
    acceptance: Acceptance
    acceptance_interval: Interval | None
    bytes_up_per_token: float | None
    bytes_down_per_token: float | None
    milliseconds_per_token: Mapping[str, float | None]
    other_clamped: int
    speedup: Speedup | None
    identical: TokenIdentity | None
    workloads: Mapping[str, WorkloadSummary]
    sent_ahead: SentAhead | None = None
    ran_on: RanOn | None = None


def summarize(
    records: Sequence[Record],
    references: References,
    traces: Mapping[str, MarginTrace] | None = None,
    names: Sequence[str] | None = None,
    plain: Sequence[Record] | None = None,
) -> list[Summary]:
    """Summarizes the records of one condition for the architectures `names` (None: all, in order of appearance).

    `plain`: the outputs that others should equal; None: those of `references.autoregressive` in `records`.
    """
    if names is None:
        names = list(dict.fromkeys(record.architecture for record in records))
    if plain is None or references.autoregressive is None:
        plain = _of(records, references.autoregressive)
    return [_summarize_one(name, records, references, traces or {}, plain) for name in names]


def _of(records: Sequence[Record], architecture: str | None) -> list[Record]:
    return [record for record in records if record.architecture == architecture]


def _metric(measurement: Measurement, name: str) -> float | None:
    value: float | None = getattr(measurement, "output_tokens" if name == "number_output_tokens" else name)
    return value


def _summarize_one(
    name: str,
    records: Sequence[Record],
    references: References,
    traces: Mapping[str, MarginTrace],
    plain: Sequence[Record],
) -> Summary:
    own = _of(records, name)
    done = completed(own)
    tokens = sum(m.output_tokens for m in done)
    baseline = _of(records, references.baseline)
    return Summary(
        architecture=name,
        requests=len(own),
        failed=len(own) - len(done),
        distributions={metric: distribution(_metric(m, metric) for m in done) for metric in DISTRIBUTIONS},
        tpot_interval=tpot_interval(own),
        chunk_gap_s=distribution(gap for m in done for gap in m.chunk_gaps_s),
        tokens_per_chunk=distribution(float(count) for m in done for count in m.chunk_tokens),
        output_throughput_token_per_s=ratio(tokens, sum(m.end_to_end_latency_s for m in done)),
        acceptance=acceptance(done),
        acceptance_interval=acceptance_interval(own),
        bytes_up_per_token=ratio(sum(m.bytes_up for m in done), tokens),
        bytes_down_per_token=ratio(sum(m.bytes_down for m in done), tokens),
        milliseconds_per_token=milliseconds_per_token(done),
        other_clamped=sum(m.other_clamped for m in done),
        speedup=speedup(own, baseline) if baseline else None,
        identical=identity(own, plain, traces) if plain else None,
        workloads=_by_workload(own, baseline, plain, traces),
        sent_ahead=sent_ahead(done),
        ran_on=ran_on(done),
    )


def _by_workload(
    own: Sequence[Record], baseline: Sequence[Record], plain: Sequence[Record], traces: Mapping[str, MarginTrace]
) -> dict[str, WorkloadSummary]:
    summaries: dict[str, WorkloadSummary] = {}
    for kind in dict.fromkeys(record.workload for record in own):
        of_kind = [record for record in own if record.workload == kind]
        done = completed(of_kind)
        summaries[kind] = WorkloadSummary(
            distribution(m.tpot_s for m in done),
            acceptance(done),
            speedup(of_kind, baseline),
            identity(of_kind, plain, traces) if plain else None,
        )
    return summaries


def summary_as_json(summary: Summary) -> dict[str, Any]:
    """Returns a flat object with LLMPerf's names. `speedup_vs_autoregressive` is None without plain decoding."""
    return {
        "requests": summary.requests,
        "failed": summary.failed,
        **{name: asdict(values) for name, values in summary.distributions.items()},
        "tpot_interval": list(summary.tpot_interval) if summary.tpot_interval else None,
        "chunk_gap_s": asdict(summary.chunk_gap_s),
        "tokens_per_chunk": asdict(summary.tokens_per_chunk),
        "output_throughput_token_per_s": summary.output_throughput_token_per_s,
        **asdict(summary.acceptance),
        "acceptance_interval": list(summary.acceptance_interval) if summary.acceptance_interval else None,
        "bytes_up_per_token": summary.bytes_up_per_token,
        "bytes_down_per_token": summary.bytes_down_per_token,
        "milliseconds_per_token": dict(summary.milliseconds_per_token),
        "requests_whose_other_seconds_were_clamped_at_0": summary.other_clamped,
        **_speedup_as_json(summary.speedup),
        "identical_to_autoregressive": asdict(summary.identical) if summary.identical else None,
        "sent_ahead": asdict(summary.sent_ahead) if summary.sent_ahead else None,
        "ran_on": asdict(summary.ran_on) if summary.ran_on else None,
        "workloads": {kind: _workload_as_json(workload) for kind, workload in summary.workloads.items()},
    }


def _speedup_as_json(value: Speedup | None) -> dict[str, Any]:
    return {
        "speedup_vs_autoregressive": value.speedup if value else None,
        "speedup_interval": list(value.interval) if value and value.interval else None,
        "end_to_end_speedup_vs_autoregressive": value.end_to_end_speedup if value else None,
        "speedup_pairs": value.pairs if value else 0,
    }


def _workload_as_json(workload: WorkloadSummary) -> dict[str, Any]:
    return {
        "tpot_s": asdict(workload.tpot_s),
        **asdict(workload.acceptance),
        **_speedup_as_json(workload.speedup),
        "identical_to_autoregressive": asdict(workload.identical) if workload.identical else None,
    }
