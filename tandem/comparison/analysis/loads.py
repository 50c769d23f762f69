"""Figures under load, named as LLMPerf's, and the clients that one target serves within a bound on TPOT."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.comparison.analysis.summary import Summary
from tandem.comparison.analysis.verdict import Evidence, Verdict, busy, loaded_verdict
from tandem.comparison.measuring.architectures import COMPARED, DISTRIBUTED, FUSED
from tandem.comparison.measuring.conditions import Condition, Load
from tandem.comparison.measuring.distributions import ratio
from tandem.comparison.measuring.records import Record


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """One architecture under one load; failed requests are errors, and their tokens do not count."""

    num_requests_started: int
    num_completed_requests: int
    number_errors: int
    error_code_frequency: Mapping[str, int]
    seconds: float  # from the first request sent to the last one ended
    num_completed_requests_per_minute: float | None
    mean_output_throughput_token_per_s: float | None


@dataclass(frozen=True, slots=True)
class LoadPoint:
    condition: str
    load: Load
    figures: Mapping[str, LoadFigures]
    verdict: Verdict | None  # None: fewer than two architectures answered everything


def load_figures(records: Sequence[Record]) -> LoadFigures:
    done = [record.measurement for record in records if record.measurement]
    sent, ended = ([getattr(r, at) or 0.0 for r in records] for at in ("sent_s", "ended_s"))
    seconds = max(ended, default=0.0) - min(sent, default=0.0)
    errors = Counter(record.error.code for record in records if record.error)
    return LoadFigures(
        num_requests_started=len(records),
        num_completed_requests=len(done),
        number_errors=errors.total(),
        error_code_frequency=dict(errors),
        seconds=seconds,
        num_completed_requests_per_minute=ratio(60 * len(done), seconds),
        mean_output_throughput_token_per_s=ratio(sum(m.output_tokens for m in done), seconds),
    )


def load_point(on: Condition, load: Load, summaries: Sequence[Summary], records: Sequence[Record]) -> LoadPoint:
    own = [record for record in records if record.condition == on.name]
    figures = {s.architecture: load_figures([r for r in own if r.architecture == s.architecture]) for s in summaries}
    means = {s.architecture: s.distributions["end_to_end_latency_s"].mean for s in summaries}
    latencies = {name: latency for name, latency in means.items() if latency is not None}
    rates = {
        name: rate
        for name, of in figures.items()
        if name in COMPARED and of.num_requests_started >= load.requests and name in latencies
        if (rate := of.mean_output_throughput_token_per_s)
    }
    evidence = Evidence(busy=busy([r.machine_load for r in own if r.machine_load], 1))
    return LoadPoint(on.name, load, figures, loaded_verdict(on, rates, latencies, evidence))


@dataclass(frozen=True, slots=True)
class Point:
    clients: int
    p95_s: float  # of the time per token
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Served:
    architecture: str
    clients: float  # within the bound; 0: not even one
    at_least: bool  # the most measured met the bound
    tokens_per_second: float | None  # of all these clients, per target's device
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Capacity:
    bound_s: float
    served: tuple[Served, ...]
    gain: float | None  # clients of distributed over fused
    law: float | None  # 1 + g t_d / t_v, the gain that arXiv 2606.25091 expects


def capacity(
    bound_s: float, loads: Sequence[LoadPoint], summaries: Mapping[str, Sequence[Summary]], law: float | None
) -> Capacity | None:
    """Returns the capacities under the closed loops; None without any."""
    found: dict[str, list[Point]] = {}
    for point in loads:
        for summary in summaries[point.condition] if point.load.concurrency is not None else ():
            figures = point.figures[summary.architecture]
            p95, rate = summary.distributions["tpot_s"].p95, figures.mean_output_throughput_token_per_s
            if p95 is not None and rate is not None and not figures.number_errors and summary.architecture in COMPARED:
                own = Point(point.load.concurrency or 1, p95, rate)
                found.setdefault(summary.architecture, []).append(own)
    served = tuple(_served(name, bound_s, points) for name, points in found.items())
    clients = {one.architecture: one.clients for one in served if not one.at_least}
    both = {DISTRIBUTED.name, FUSED.name} <= set(clients)
    gain = ratio(clients[DISTRIBUTED.name], clients[FUSED.name]) if both else None
    return Capacity(bound_s, served, gain, law) if served else None


def _served(name: str, bound_s: float, points: Sequence[Point]) -> Served:
    ordered = tuple(sorted(points, key=lambda point: point.clients))
    clients, rate = most_clients(bound_s, ordered)
    return Served(name, clients, bool(clients) and clients == ordered[-1].clients, rate, ordered)


def most_clients(bound_s: float, points: Sequence[Point]) -> tuple[float, float | None]:
    """Returns the most clients within the bound and their tokens per second, linear between ascending points."""
    if points[0].p95_s > bound_s:
        return 0.0, None
    for below, above in itertools.pairwise(points):
        if above.p95_s > bound_s:
            share = (bound_s - below.p95_s) / (above.p95_s - below.p95_s)
            rates = below.tokens_per_second, above.tokens_per_second
            return below.clients + share * (above.clients - below.clients), rates[0] + share * (rates[1] - rates[0])
    return float(points[-1].clients), points[-1].tokens_per_second
