"""Computes component times from calibration requests: the cost of steps, and of a round beyond its steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tandem.comparison.analysis.line_fit import LineFit, fit_line
from tandem.comparison.links.settings import LinkSettings
from tandem.comparison.measuring.calibration import Calibration
from tandem.comparison.measuring.records import Measurement


@dataclass(frozen=True, slots=True)
class ArchitectureCosts:
    """The component times of one architecture, in seconds.

    draft_fixed + g * draft_slope: drafting g tokens in a round (copied tokens cost almost nothing).
    verify_fixed + n * verify_slope: verifying n positions. Both are non-negative least squares fits over the requested
    lengths; `fits` ("draft", "verify") have their intervals and what was held at 0. `..._by_...`: the measured means.
    round_overhead: the time of a round that neither steps nor network explain, including waiting for the device.
    rpc: the round trip to the other side without added delay. message_bytes: a round's payload, both ways.
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
        """Returns the seconds to draft `length` tokens in a round."""
        return self.draft_fixed_s + self.draft_slope_s * length if length else 0.0

    def verify(self, length: int) -> float:
        """Returns the seconds to verify `length` draft tokens and the token before them."""
        return self.verify_fixed_s + self.verify_slope_s * (length + 1)


def costs_by_architecture(found: Sequence[Calibration], link: LinkSettings) -> dict[str, ArchitectureCosts]:
    """Computes costs by architecture. The configured delay of `link` is subtracted from round trips."""
    grouped: defaultdict[str, list[Calibration]] = defaultdict(list)
    for one in found:
        if one.measurement.rounds:
            grouped[one.architecture].append(one)
    return {name: _costs(group, link) for name, group in grouped.items()}


def _costs(group: Sequence[Calibration], link: LinkSettings) -> ArchitectureCosts:
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
    # The size of a verification is in positions: the draft tokens and the one before them.
    verifying = [
        np.array([(m.seconds_by_cause.verify, m.rounds + m.drafted, m.rounds) for m in ms], float)
        for ms in by_length.values()
    ]
    drafting = [
        np.array([(m.seconds_by_cause.draft, m.rounds * length, m.rounds) for m in ms], float)
        for length, ms in sorted(by_length.items())
        if length
    ]
    fits = {"verify": fit_line(verifying), **({"draft": fit_line(drafting)} if drafting else {})}
    drafted = fits.get("draft", LineFit(0.0, 0.0))
    everything = [m for ms in by_length.values() for m in ms]
    # A target whose draft is elsewhere sends nothing in a round without a draft.
    asking = [m for length, ms in by_length.items() if length for m in ms] or everything
    message_bytes = _per_round(asking, lambda m: m.bytes_up + m.bytes_down)
    return ArchitectureCosts(
        draft_fixed_s=drafted.fixed_s,
        draft_slope_s=drafted.slope_s,
        draft_s_by_length=draft,
        verify_fixed_s=fits["verify"].fixed_s,
        verify_slope_s=fits["verify"].slope_s,
        verify_s_by_positions=dict(sorted(verify.items())),
        round_overhead_s=_per_round(everything, lambda m: _overhead(m, link.seconds)),
        rpc_s=max(0.0, _per_round(asking, lambda m: m.seconds_by_cause.network) - link.round_trip(message_bytes)),
        message_bytes=message_bytes,
        fits=fits,
    )


def _overhead(measurement: Measurement, added_rtt: float) -> float:
    """Returns the overhead of the rounds, without the request's own trip across the link."""
    causes = measurement.seconds_by_cause
    return causes.queue + max(0.0, causes.other - added_rtt)


def _per_round(measurements: Sequence[Measurement], value: Callable[[Measurement], float]) -> float:
    rounds = sum(m.rounds for m in measurements)
    return sum(value(m) for m in measurements) / rounds if rounds else 0.0
