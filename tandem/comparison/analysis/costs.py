"""Component times from calibrating requests: what a step costs, and what a round costs beyond its steps. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tandem.comparison.analysis.line_fit import LineFit, Point, fit_line
from tandem.comparison.measuring.calibration import Calibration
from tandem.comparison.measuring.conditions import LinkChoice
from tandem.comparison.measuring.records import Measurement


@dataclass(frozen=True, slots=True)
class ArchitectureCosts:
    """Seconds for one architecture.

    draft_fixed + g * draft_slope: a round of g draft tokens (copied ones cost next to nothing). verify_fixed + n *
    verify_slope: a verification of n positions. Both are non-negative least squares over the lengths asked for; `fits`
    ("draft", "verify") say how sure they are and what was held at 0; `..._by_...` are the measured means.
    round_overhead: of a round, what neither steps nor network explain, waiting for the device included.
    rpc: of a round trip to the other side at no added delay. message_bytes: a round's payload, both ways.
    """

    draft_fixed_s: float
    draft_slope_s: float
    draft_s_by_length: dict[int, float]
    verify_fixed_s: float
    verify_slope_s: float
    verify_s_by_positions: dict[float, float]
    round_overhead_s: float
    rpc_s: float
    message_bytes: float
    fits: Mapping[str, LineFit] = field(default_factory=dict)

    def draft(self, length: int) -> float:
        """Of a round of `length` draft tokens."""
        return self.draft_fixed_s + self.draft_slope_s * length if length else 0.0

    def verify(self, length: int) -> float:
        """Of a round of `length` draft tokens, and the token before them."""
        return self.verify_fixed_s + self.verify_slope_s * (length + 1)


def costs_by_architecture(found: Sequence[Calibration], link: LinkChoice | None = None) -> dict[str, ArchitectureCosts]:
    """`link`: what lay between while calibrating; what it is set to is taken out of the round trips."""
    grouped: defaultdict[str, list[Calibration]] = defaultdict(list)
    for one in found:
        if one.measurement.rounds:
            grouped[one.architecture].append(one)
    return {name: _costs(group, link or LinkChoice()) for name, group in grouped.items()}


def _costs(group: Sequence[Calibration], link: LinkChoice) -> ArchitectureCosts:
    by_length: defaultdict[int, list[Measurement]] = defaultdict(list)
    for one in group:
        by_length[one.length].append(one.measurement)
    verify = {
        round(1 + _per_round(ms, lambda m: m.drafted), 2): _per_round(ms, lambda m: m.seconds_by_cause.verify)
        for ms in by_length.values()
    }
    draft = {
        length: _per_round(ms, lambda m: m.seconds_by_cause.draft) for length, ms in sorted(by_length.items()) if length
    }
    fits = {"verify": fit_line([[_verified(m) for m in ms] for ms in by_length.values()])}
    if draft:
        drafting = [[_drafted(m, g) for m in ms] for g, ms in sorted(by_length.items()) if g]
        fits["draft"] = fit_line(drafting)
    drafted = fits.get("draft", LineFit(0.0, 0.0))
    everything = [m for ms in by_length.values() for m in ms]
    message_bytes = _per_round(everything, lambda m: m.bytes_up + m.bytes_down)
    return ArchitectureCosts(
        draft_fixed_s=drafted.fixed_s,
        draft_slope_s=drafted.slope_s,
        draft_s_by_length=draft,
        verify_fixed_s=fits["verify"].fixed_s,
        verify_slope_s=fits["verify"].slope_s,
        verify_s_by_positions=dict(sorted(verify.items())),
        round_overhead_s=_per_round(everything, lambda m: _overhead(m, link.seconds)),
        rpc_s=max(0.0, _per_round(everything, lambda m: m.seconds_by_cause.network) - link.round_trip(message_bytes)),
        message_bytes=message_bytes,
        fits=fits,
    )


def _verified(m: Measurement) -> Point:
    """Sizes are positions: the draft tokens and the one before them."""
    return Point(m.seconds_by_cause.verify, m.rounds + m.drafted, m.rounds)


def _drafted(m: Measurement, length: int) -> Point:
    """Sizes are draft tokens asked for."""
    return Point(m.seconds_by_cause.draft, m.rounds * length, m.rounds)


def _overhead(measurement: Measurement, added_rtt: float) -> float:
    """The request itself crosses the link once; that is no part of a round."""
    causes = measurement.seconds_by_cause
    return causes.queue + max(0.0, causes.other - added_rtt)


def _per_round(measurements: Sequence[Measurement], value: Callable[[Measurement], float]) -> float:
    rounds = sum(m.rounds for m in measurements)
    return sum(value(m) for m in measurements) / rounds if rounds else 0.0
