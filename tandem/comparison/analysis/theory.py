"""Predicts times per token: plain, draft beside the target, draft apart.

Component times are those of calibration on the base's link; tokens and drafts of a round those measured on each link.
Overlapping rounds (never waiting, pipelined) are not predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tandem.comparison.analysis.summary import Summary
from tandem.comparison.links.link_settings import LinkSettings
from tandem.comparison.measuring import architectures as arch
from tandem.comparison.measuring.conditions import BASE, LINK, Condition
from tandem.comparison.measuring.distributions import ratio
from tandem.comparison.measuring.records import Measurement

MISSED = 1.25  # a prediction off by more than this factor is not relied on
PREDICTED = (arch.DISTRIBUTED.name, arch.FUSED.name, arch.REMOTE_DRAFT.name)


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


Calibrations = Mapping[str, Mapping[int, Sequence[Measurement]]]  # by architecture and draft tokens of a round


def costs_by_architecture(calibrations: Calibrations, link: LinkSettings) -> dict[str, Costs]:
    """Computes costs by architecture, without the configured delay of `link`."""
    with_rounds = {
        name: {length: known for length, found in by_length.items() if (known := [m for m in found if m.rounds])}
        for name, by_length in calibrations.items()
    }
    return {name: _costs(by_length, link) for name, by_length in with_rounds.items() if by_length}


def _costs(by_length: Mapping[int, Sequence[Measurement]], link: LinkSettings) -> Costs:
    def overhead(m: Measurement) -> float:
        """The overhead of the rounds, without the request's own trip across the link."""
        return m.seconds_by_cause.queue + max(0.0, m.seconds_by_cause.other - link.seconds)

    everything = [m for ms in by_length.values() for m in ms]
    # A target whose draft is elsewhere sends nothing in a round without a draft.
    asking = [m for length, ms in by_length.items() if length for m in ms] or everything
    message_bytes = _per_round(asking, lambda m: m.bytes_up + m.bytes_down)
    drafts = [
        (float(length), _per_round(ms, lambda m: m.seconds_by_cause.draft))
        for length, ms in by_length.items()
        if length
    ]
    verifications = [
        (1 + _per_round(ms, lambda m: m.drafted), _per_round(ms, lambda m: m.seconds_by_cause.verify))
        for ms in by_length.values()
    ]
    return Costs(
        *line(drafts),
        *line(verifications),
        overhead_s=_per_round(everything, overhead),
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


def _per_round(measurements: Sequence[Measurement], value: Callable[[Measurement], float]) -> float:
    rounds = sum(m.rounds for m in measurements)
    return sum(map(value, measurements)) / rounds if rounds else 0.0


@dataclass(frozen=True, slots=True)
class MeanRound:
    committed: float  # tokens per round
    drafted: float  # draft tokens verified per round
    drafting: float  # share of rounds with a draft
    tokens: float  # output length

    @property
    def as_defined(self) -> float:
        """Factor to TPOT = (E2E - TTFT) / (n - 1), which counts the first round's tokens but not its time."""
        return (self.tokens - self.committed) / (self.tokens - 1) if self.tokens > self.committed else 1.0


def rounds_of(summary: Summary) -> MeanRound | None:
    """Returns None without drafts."""
    of, tokens = summary.acceptance, summary.distributions["number_output_tokens"].mean
    if not of.drafted or not of.rounds or tokens is None:
        return None
    proposing = 1.0 if of.proposing is None else of.proposing
    return MeanRound(1 + of.accepted / of.rounds, of.drafted / of.rounds, proposing, tokens)


@dataclass(frozen=True, slots=True)
class Prediction:
    architecture: str
    condition: str
    predicted_s: float
    measured_s: float | None

    @property
    def error(self) -> float | None:
        share = ratio(self.predicted_s, self.measured_s or 0.0)
        return None if share is None else share - 1

    @property
    def missed(self) -> bool:
        return self.error is not None and not 1 / MISSED <= 1 + self.error <= MISSED


@dataclass(frozen=True, slots=True)
class Theory:
    """Component times in seconds and their consequences."""

    plain_tpot_s: float
    costs: Mapping[str, Costs]
    rounds: Mapping[str, MeanRound]  # of the base
    predictions: tuple[Prediction, ...] = ()
    break_even_rtt_s: float | None = None  # below it distributed beats plain decoding; None: at no round trip
    best_lengths: Mapping[str, int] = field(default_factory=dict)  # fastest fixed length on the base's link, 0: plain
    capacity_gain: float | None = None  # 1 + draft / verification: clients with drafts apart over beside

    @property
    def missed(self) -> list[str]:
        """The architectures whose predictions are not relied on."""
        return sorted({prediction.architecture for prediction in self.predictions if prediction.missed})

    def round_s(self, name: str, rounds: MeanRound) -> tuple[float, float]:
        of = self.costs[name]
        draft = of.draft_fixed_s * rounds.drafting + of.draft_slope_s * rounds.drafted
        return draft, of.verify_fixed_s + of.verify_slope_s * (1 + rounds.drafted)

    def tpot_s(self, name: str, link: LinkSettings, rounds: MeanRound | None = None) -> float:
        """Returns the predicted time per token. `rounds`: on this link; None: the base's."""
        if name in arch.PLAIN:
            return self.plain_tpot_s
        of, rounds = self.costs[name], rounds or self.rounds[name]
        seconds = sum(self.round_s(name, rounds)) + of.overhead_s
        if arch.COMPARED[name].split:
            seconds += asking(name, rounds) * (link.round_trip(of.message_bytes) + of.rpc_s)
        return seconds / rounds.committed * rounds.as_defined


def asking(name: str, rounds: MeanRound) -> float:
    """Returns round trips per round; a target with a remote draft makes none in a round without a draft."""
    return rounds.drafting if name == arch.REMOTE_DRAFT.name else 1.0


def theory_of(
    conditions: Sequence[Condition], summaries: Mapping[str, Sequence[Summary]], calibrations: Calibrations
) -> Theory | None:
    """Predicts every link; None unless plain decoding and a drafting architecture were calibrated."""
    base = conditions[0]
    costs = costs_by_architecture(calibrations, base.link)
    plain = next((name for name in reversed(arch.PLAIN) if name in costs), None)
    drafting = {s.architecture: found for s in summaries[base.name] if (found := rounds_of(s))}
    rounds = {name: drafting[name] for name in PREDICTED if name in drafting and name in costs}
    if plain is None or not rounds:
        return None
    step = costs[plain]
    model = Theory(step.verify_fixed_s + step.verify_slope_s + step.overhead_s, costs, rounds)
    links = [c for c in conditions if c.varies in (BASE, LINK) and c.link.predictable]
    return replace(
        model,
        predictions=tuple(p for c in links for p in _predictions(model, plain, c, summaries[c.name])),
        break_even_rtt_s=_break_even(model, base.link),
        best_lengths={name: _best_length(model, name, base.link, calibrations[name]) for name in rounds},
        capacity_gain=_capacity_gain(model),
    )


def _predictions(model: Theory, plain: str, on: Condition, summaries: Sequence[Summary]) -> list[Prediction]:
    by_name = {s.architecture: s for s in summaries}
    measured = {name: by_name[name].tpot_s if name in by_name else None for name in (plain, *model.rounds)}
    rounds = {name: rounds_of(by_name[name]) for name in model.rounds if name in by_name}
    return [
        Prediction(name, on.name, model.tpot_s(name, on.link, rounds.get(name)), tpot_s)
        for name, tpot_s in measured.items()
    ]


def _break_even(model: Theory, base: LinkSettings) -> float | None:
    """Returns the round trip in seconds at which distributed equals plain decoding."""
    name = arch.DISTRIBUTED.name
    if name not in model.rounds:
        return None
    rounds, near = model.rounds[name], replace(base, rtt_ms=0.0)
    left = (model.plain_tpot_s - model.tpot_s(name, near)) / rounds.as_defined * rounds.committed
    return left if left > 0 else None


def _best_length(model: Theory, name: str, link: LinkSettings, by_length: Mapping[int, Sequence[Measurement]]) -> int:
    """Returns the fastest fixed length, by calibration's acceptance: auto drafts much where much is accepted."""
    tpots, committed = [model.plain_tpot_s], 1.0
    for position in range(max(by_length)):
        reaching = [m for length, found in by_length.items() if length > position for m in found]
        accepted = sum(sum(m.accepted_per_position[position : position + 1]) for m in reaching)
        committed += ratio(accepted, sum(m.rounds for m in reaching)) or 0.0
        rounds = MeanRound(committed, position + 1, 1.0, model.rounds[name].tokens)
        tpots.append(model.tpot_s(name, link, rounds))
    return min(range(len(tpots)), key=tpots.__getitem__)


def _capacity_gain(model: Theory) -> float | None:
    if arch.FUSED.name not in model.rounds:
        return None
    gain = ratio(*model.round_s(arch.FUSED.name, model.rounds[arch.FUSED.name]))
    return None if gain is None else 1 + gain
