"""Says how many clients one target serves within a bound on the 95th percentile of the time per token.

Between two measured numbers of clients the time is taken as linear: once the target is always busy, it grows by the
same for each client. Each client of an architecture that drafts apart has a draft of its own, so the target alone is
shared, and arXiv 2606.25091 expects 1 + g t_d / t_v times the clients of a draft beside the target.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tandem.comparison.analysis.summary import Summary
from tandem.comparison.analysis.under_load import UnderLoad
from tandem.comparison.measuring.architectures import COMPARED, DISTRIBUTED, FUSED
from tandem.comparison.measuring.distributions import ratio


@dataclass(frozen=True, slots=True)
class Point:
    """One number of clients of one architecture: the 95th percentile of the time per token, and tokens per second."""

    clients: int
    p95_s: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Served:
    """What one target of an architecture serves. `clients`: within the bound; 0: not even one.

    at_least: the bound was met by the most clients that were measured. tokens_per_second: of that many clients
    together, per target's device.
    """

    architecture: str
    clients: float
    at_least: bool
    tokens_per_second: float | None
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Capacity:
    """What every architecture serves. `gain`: distributed over fused, in clients; `law`: what is expected of that."""

    bound_s: float
    served: tuple[Served, ...]
    gain: float | None
    law: float | None


def capacity(
    bound_s: float,
    loaded: UnderLoad | None,
    summaries: Mapping[str, Sequence[Summary]],
    law: float | None,
) -> Capacity | None:
    """Returns the capacities under the loads that have a number of clients; None if no architecture was measured so."""
    found: dict[str, list[Point]] = {}
    for point in loaded.points if loaded else ():
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


def _served(name: str, bound_s: float, points: Iterable[Point]) -> Served:
    ordered = tuple(sorted(points, key=lambda point: point.clients))
    clients, rate = most_clients(bound_s, ordered)
    at_least = bool(clients) and clients == ordered[-1].clients
    return Served(name, clients, at_least, rate, ordered)


def most_clients(bound_s: float, points: Sequence[Point]) -> tuple[float, float | None]:
    """Returns the most clients within the bound and their tokens per second, from points in the order of clients."""
    if points[0].p95_s > bound_s:
        return 0.0, None
    for below, above in itertools.pairwise(points):
        if above.p95_s > bound_s:
            share = (bound_s - below.p95_s) / (above.p95_s - below.p95_s)
            rates = below.tokens_per_second, above.tokens_per_second
            return below.clients + share * (above.clients - below.clients), rates[0] + share * (rates[1] - rates[0])
    return float(points[-1].clients), points[-1].tokens_per_second
