"""Computes the figures of each architecture under each load, and decides which one to use there.

Names and definitions are LLMPerf's: completed requests and output tokens over the time from the first request sent to
the last one ended; a failed request counts as an error, and its tokens do not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tandem.comparison.analysis.doubt import Doubt, doubt
from tandem.comparison.analysis.evidence import beside
from tandem.comparison.analysis.summary import Summary
from tandem.comparison.measuring.architectures import AUTOREGRESSIVE, COMPARED
from tandem.comparison.measuring.conditions import LOAD, Condition
from tandem.comparison.measuring.distributions import ratio
from tandem.comparison.measuring.json_form import INLINE, named
from tandem.comparison.measuring.loads import Load
from tandem.comparison.measuring.records import Record
from tandem.comparison.report.formatting import joined, name_in_sentence

CLOSE = 0.03
"""Throughputs that differ by less than this share are taken as equal; the latency then decides."""


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """One architecture under one load. `seconds`: from the first request sent to the last one ended."""

    num_requests_started: int
    num_completed_requests: int
    number_errors: int
    error_rate: float | None
    error_code_frequency: Mapping[str, int]
    seconds: float
    num_completed_requests_per_minute: float | None
    mean_output_throughput_token_per_s: float | None


@dataclass(frozen=True, slots=True)
class Best:
    """The architecture to use under a load. `throughput_ratio`: over plain decoding's under the same load."""

    architecture: str
    throughput_ratio: float | None
    close: tuple[str, ...]
    sentence: str
    doubt: Doubt = field(metadata=INLINE)


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """One load. `best` None: fewer than two architectures answered all of its requests."""

    condition: str
    load: Load = field(metadata=INLINE)
    best: Best | None
    figures: Mapping[str, LoadFigures] = field(metadata=named("architectures"))


@dataclass(frozen=True, slots=True)
class UnderLoad:
    """All loads that were measured. `headline` None: no load allows a decision."""

    headline: str | None
    points: tuple[LoadPoint, ...]


def load_figures(records: Sequence[Record]) -> LoadFigures:
    """Computes the figures of one architecture's records under one load."""
    done = [record.measurement for record in records if record.measurement]
    sent = [record.sent_s for record in records if record.sent_s is not None]
    ended = [record.ended_s for record in records if record.ended_s is not None]
    seconds = max(ended, default=0.0) - min(sent, default=0.0)
    errors = Counter(record.error.code for record in records if record.error)
    return LoadFigures(
        num_requests_started=len(records),
        num_completed_requests=len(done),
        number_errors=errors.total(),
        error_rate=ratio(errors.total(), len(records)),
        error_code_frequency=dict(errors),
        seconds=seconds,
        num_completed_requests_per_minute=ratio(60 * len(done), seconds),
        mean_output_throughput_token_per_s=ratio(sum(m.output_tokens for m in done), seconds),
    )


def under_load(
    conditions: Sequence[Condition],
    summaries: Mapping[str, Sequence[Summary]],
    records: Sequence[Record],
    cores: int = 1,
) -> UnderLoad | None:
    """Decides under every load; None if none was measured. `summaries` are by condition, `cores` of this machine."""
    points = tuple(
        _point(c.name, c.load, summaries[c.name], [r for r in records if r.condition == c.name], cores)
        for c in conditions
        if c.varies == LOAD and c.load is not None
    )
    return UnderLoad(_headline(points), points) if points else None


def _point(
    condition: str, load: Load, summaries: Sequence[Summary], records: Sequence[Record], cores: int
) -> LoadPoint:
    figures = {
        s.architecture: load_figures([r for r in records if r.architecture == s.architecture]) for s in summaries
    }
    # Our own servers run all the time, so the load average and the threads that wait tell nothing of other programs.
    evidence = replace(beside(records, cores), waiting=None, load_average=None, once=True)
    by_name = {s.architecture: s for s in summaries}
    return LoadPoint(condition, load, _best(load, figures, by_name, doubt(evidence)), figures)


def _best(
    load: Load, figures: Mapping[str, LoadFigures], summaries: Mapping[str, Summary], doubts: Doubt
) -> Best | None:
    """Returns the architecture with the most tokens per second; among close ones, that with the least latency."""
    rates = {
        name: rate
        for name, of in figures.items()
        if name in COMPARED and of.num_requests_started >= load.requests
        if (rate := of.mean_output_throughput_token_per_s) is not None and rate > 0
    }
    if len(rates) < 2:
        return None
    most = max(rates.values())
    latency = {
        name: mean
        for name, rate in rates.items()
        if rate >= (1 - CLOSE) * most
        if (mean := summaries[name].distributions["end_to_end_latency_s"].mean) is not None
    }
    best = min(latency, key=lambda name: (latency[name], -rates[name]))
    plain = rates.get(AUTOREGRESSIVE.name)
    over = None if plain is None or best == AUTOREGRESSIVE.name else ratio(rates[best], plain)
    close = tuple(name for name in latency if name != best)
    return Best(best, over, close, _sentence(load, best, over, close, rates, summaries[best]), doubts)


def _sentence(
    load: Load, best: str, over: float | None, close: Sequence[str], rates: Mapping[str, float], summary: Summary
) -> str:
    plain = f" ({over:.2f} times plain decoding's)" if over is not None else ""
    times = [
        f"{name} {1000 * value:.1f} ms"
        for name, metric in (("TPOT", "tpot_s"), ("TTFT", "ttft_s"))
        if (value := summary.distributions[metric].p50) is not None
    ]
    others = sorted((name for name in rates if name != best), key=lambda name: -rates[name])
    rest = joined([f"{name_in_sentence(name)} {rates[name]:.1f}" for name in others])
    equal = f" It has the least latency of those within {100 * CLOSE:g} % of the most." if close else ""
    return (
        f"{str(load)[:1].upper()}{str(load)[1:]}: {name_in_sentence(best)}, {rates[best]:.1f} tokens/s{plain}"
        f" at a median {' and '.join(times)}; {rest}.{equal}"
    )


def _headline(points: Sequence[LoadPoint]) -> str | None:
    """Names the best architecture under each load, in order of how often it is the best."""
    by_name: dict[str, list[str]] = {}
    for point in points:
        if point.best:
            by_name.setdefault(point.best.architecture, []).append(str(point.load))
    if not by_name:
        return None
    parts = [
        f"{name_in_sentence(name)} at {joined(loads)}"
        for name, loads in sorted(by_name.items(), key=lambda i: -len(i[1]))
    ]
    return f"Under load: {joined(parts)}."
