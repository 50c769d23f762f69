"""Computes how many clients one target serves within a bound on the time per token."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.comparison.analysis.summary import Summary
from tandem.comparison.measuring.architectures import COMPARED, DISTRIBUTED, FUSED
from tandem.comparison.measuring.distributions import ratio

Point = tuple[int, float, float]  # clients, 95th percentile of their seconds per token, tokens per second


@dataclass(frozen=True, slots=True)
class ClientsServed:
    architecture: str
    clients: float  # within the bound; 0: not even one
    at_least: bool  # the most measured met the bound
    tokens_per_second: float | None  # of all these clients, per target's device
    p95_s: Mapping[int, float]  # of the time per token, by clients


def capacity(bound_s: float, loads: Sequence[tuple[int, Sequence[Summary]]]) -> tuple[ClientsServed, ...]:
    """Returns each architecture's capacity. `loads`: the closed loops, as (clients, summaries)."""
    found: dict[str, list[Point]] = {}
    for clients, summaries in loads:
        for s in summaries:
            p95, rate = s.distributions["tpot_s"].p95, s.mean_output_throughput_token_per_s
            if p95 is not None and rate is not None and not s.failed and s.architecture in COMPARED:
                found.setdefault(s.architecture, []).append((clients, p95, rate))
    return tuple(_served(name, bound_s, sorted(points)) for name, points in found.items())


def gain_of(served: Sequence[ClientsServed]) -> float | None:
    """Returns the clients of distributed over those of fused, if both met the bound's limit."""
    most = {one.architecture: one.clients for one in served if not one.at_least}
    both = {DISTRIBUTED.name, FUSED.name} <= set(most)
    return ratio(most[DISTRIBUTED.name], most[FUSED.name]) if both else None


def law_of(fused: Summary) -> float | None:
    """Returns 1 + g t_d / t_v (arXiv 2606.25091): the gain expected where the target is the bottleneck."""
    draft, verify = (fused.milliseconds_per_token[cause] for cause in ("draft", "verify"))
    return 1 + draft / verify if draft and verify else None


def _served(name: str, bound_s: float, points: Sequence[Point]) -> ClientsServed:
    clients, rate = most_clients(bound_s, points)
    at_least = bool(clients) and clients == points[-1][0]
    return ClientsServed(name, clients, at_least, rate, {count: p95 for count, p95, _ in points})


def most_clients(bound_s: float, points: Sequence[Point]) -> tuple[float, float | None]:
    """Returns the most clients within the bound and their tokens per second, linear between ascending points."""
    if points[0][1] > bound_s:
        return 0.0, None
    for (clients, p95, rate), (more, slower, other_rate) in itertools.pairwise(points):
        if slower > bound_s:
            share = (bound_s - p95) / (slower - p95)
            return clients + share * (more - clients), rate + share * (other_rate - rate)
    return float(points[-1][0]), points[-1][2]
