"""Component times of rounds, from calibration requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tandem.comparison.links.settings import LinkSettings
from tandem.comparison.measuring.records import Calibration, Measurement


@dataclass(frozen=True, slots=True)
class Costs:
    """Component times of one architecture, in seconds; slopes are per token or position."""

    draft_fixed_s: float
    draft_slope_s: float
    verify_fixed_s: float
    verify_slope_s: float
    overhead_s: float  # rest of a round, waiting for the device included
    rpc_s: float  # round trip without added delay
    message_bytes: float  # payload of a round, both ways


def costs_by_architecture(found: Sequence[Calibration], link: LinkSettings) -> dict[str, Costs]:
    """Computes costs by architecture, without the configured delay of `link`."""
    grouped: defaultdict[str, dict[int, list[Measurement]]] = defaultdict(lambda: defaultdict(list))
    for one in found:
        if one.measurement.rounds:
            grouped[one.architecture][one.length].append(one.measurement)
    return {name: _costs(by_length, link) for name, by_length in grouped.items()}


def _costs(by_length: Mapping[int, list[Measurement]], link: LinkSettings) -> Costs:
    everything = [m for ms in by_length.values() for m in ms]
    # A target whose draft is elsewhere sends nothing in a round without a draft.
    asking = [m for length, ms in by_length.items() if length for m in ms] or everything
    message_bytes = _per_round(asking, lambda m: m.bytes_up + m.bytes_down)
    drafting = {length: ms for length, ms in by_length.items() if length}
    drafts = [(float(length), _per_round(ms, lambda m: m.seconds_by_cause.draft)) for length, ms in drafting.items()]
    verifications = [
        (1 + _per_round(ms, lambda m: m.drafted), _per_round(ms, lambda m: m.seconds_by_cause.verify))
        for ms in by_length.values()
    ]
    return Costs(
        *line(drafts),
        *line(verifications),
        overhead_s=_per_round(everything, lambda m: _overhead(m, link.seconds)),
        rpc_s=max(0.0, _per_round(asking, lambda m: m.seconds_by_cause.network) - link.round_trip(message_bytes)),
        message_bytes=message_bytes,
    )


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fits seconds = fixed + slope * size by least squares; returns (fixed, slope), neither below 0."""
    if not points:
        return 0.0, 0.0
    sizes, seconds = np.array(points, float).T
    mean = float(seconds.mean())
    if np.ptp(sizes) < 1e-9 * sizes.mean():
        return mean, 0.0
    slope, fixed = map(float, np.polyfit(sizes, seconds, 1))
    if slope < 0:
        return mean, 0.0
    return (fixed, slope) if fixed >= 0 else (0.0, mean / float(sizes.mean()))


def _overhead(measurement: Measurement, added_rtt: float) -> float:
    """Returns the overhead of the rounds, without the request's own trip across the link."""
    causes = measurement.seconds_by_cause
    return causes.queue + max(0.0, causes.other - added_rtt)


def _per_round(measurements: Sequence[Measurement], value: Callable[[Measurement], float]) -> float:
    rounds = sum(m.rounds for m in measurements)
    return sum(value(m) for m in measurements) / rounds if rounds else 0.0
