"""Predicts each architecture's time per token from the component times of the run.

Component times come from calibration requests on the base's link (tandem/comparison/analysis/costs.py), acceptance from
the base's measured requests; TPOT on every other link is a true prediction. TPOT = (E2E - TTFT) / (n - 1) excludes the
time of the first chunk but not all of its tokens: a request of n tokens in rounds of E tokens has n / E - 1 rounds
after the first, and predictions follow that definition.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.comparison.analysis.bootstrap import Interval, ratio_interval
from tandem.comparison.analysis.costs import ArchitectureCosts
from tandem.comparison.analysis.doubt import MISSED
from tandem.comparison.analysis.metrics import ratio, sum_positions
from tandem.comparison.links.settings import LinkSettings
from tandem.comparison.measuring import architectures as arch
from tandem.comparison.measuring.records import Measurement
from tandem.speculation import theory
from tandem.speculation.never_waiting_theory import RunCosts, Undrafted, tpot_never_waiting
from tandem.speculation.theory import StepCosts

NOTES = (
    "Component times are from short calibrating requests between the measured ones, acceptance from the measured ones.",
    "A draft and a verification cost a fixed part and a part per token, fitted by least squares; neither is below 0.",
    "Beyond the measured positions the last conditional acceptance is carried on.",
    "The figure of pipelined decoding is a lower bound: rounds in flight without end.",
    "The figure of a target that never waits assumes the acceptance and the costs of distributed rounds, and the copies"
    " of lookup, where that was measured, in steps for which no draft has arrived.",
    "The break-even is that of long outputs: TPOT counts the first chunk's tokens, not its time.",
    "The capacity gain holds where the target is the bottleneck and requests do not share steps.",
)


@dataclass(frozen=True, slots=True)
class Drafted:
    """The acceptance of an architecture's drafts in the base, over all rounds, also those without a draft.

    rates[i]: P(draft token i accepted | all before it accepted). by_prompt: rounds and accepted tokens of every prompt.
    tokens: mean output length.
    """

    rates: tuple[float, ...]
    by_prompt: tuple[tuple[int, int], ...]
    tokens: float

    @property
    def per_round(self) -> float:
        return theory.expected_tokens_measured(self.rates)


def drafted(by_prompt: Mapping[str, Sequence[Measurement]]) -> Drafted:
    every = [m for ms in by_prompt.values() for m in ms]
    accepted = sum_positions(m.accepted_per_position for m in every)
    reached = [sum(m.rounds for m in every), *accepted]
    return Drafted(
        tuple(a / r if r else 0.0 for a, r in zip(accepted, reached, strict=False)),
        tuple((sum(m.rounds for m in ms), sum(m.accepted for m in ms)) for ms in by_prompt.values()),
        sum(m.output_tokens for m in every) / len(every),
    )


@dataclass(frozen=True, slots=True)
class Copied:
    """The rounds of lookup alone in the base: tokens committed in one, and draft tokens that it verifies."""

    tokens: float
    drafted: float


def copied(found: Sequence[Measurement]) -> Copied | None:
    """Returns what lookup alone did in these requests; None without a round."""
    rounds = sum(m.rounds for m in found)
    if not rounds:
        return None
    return Copied(1 + sum(m.accepted for m in found) / rounds, sum(m.drafted for m in found) / rounds)


@dataclass(frozen=True, slots=True)
class Model:
    """The inputs of predictions. `plain_s`: seconds of a plain target step; `length`: the measured length.

    `copies`: those of lookup alone, if it was measured.
    """

    plain_s: float
    costs: Mapping[str, ArchitectureCosts]
    drafts: Mapping[str, Drafted]
    length: int
    copies: Copied | None = None

    def steps(self, name: str, length: int) -> StepCosts:
        of = self.costs[name]
        return StepCosts(of.draft(length) / max(1, length), self.plain_s, of.verify_fixed_s, of.verify_slope_s)

    def lengths(self, name: str) -> range:
        """Returns the speculation lengths from 0 to the longest that was calibrated or measured."""
        return range(int(max(self.length, *self.costs[name].draft_s_by_length)) + 1)

    @property
    def plain_tpot(self) -> float:
        of = self.costs.get(arch.AUTOREGRESSIVE.name)
        return self.plain_s + (of.round_overhead_s if of else 0.0)

    def tpot(self, name: str, link: LinkSettings, length: int | None = None) -> float:
        """Returns the predicted seconds per output token."""
        g = self.length if length is None else length
        if name == arch.AUTOREGRESSIVE.name or g == 0:
            return self.plain_tpot
        base = arch.DISTRIBUTED.name if name in (arch.PIPELINED.name, arch.NEVER_WAITING.name) else name
        of, drafts, steps = self.costs[base], self.drafts[base], self.steps(base, g)
        rates = theory.carried_on(drafts.rates, g)
        tokens = theory.expected_tokens_measured(rates)
        if name == arch.PIPELINED.name:
            return theory.tpot_pipelined(
                steps, theory.rate_for(tokens, g), link.round_trip(of.message_bytes) + of.rpc_s
            )
        if name == arch.NEVER_WAITING.name:
            return self._never_waiting(link, g, theory.rate_for(tokens, g))
        if arch.COMPARED[base].split:
            waited, sent = link.seconds + of.rpc_s, link.transfer(of.message_bytes)
            value = theory.tpot_stop_and_wait(steps, rates, waited, sent, of.round_overhead_s)
        else:
            value = theory.tpot_fused(steps, rates, of.round_overhead_s)
        return value * _as_defined(drafts.tokens, tokens)

    def _never_waiting(self, link: LinkSettings, length: int, rate: float) -> float:
        """Returns the predicted seconds per token of a target that never waits, from the costs of rounds that wait."""
        of, steps = self.costs[arch.DISTRIBUTED.name], self.steps(arch.DISTRIBUTED.name, length)
        overhead = self.plain_tpot - self.plain_s
        plain = self.plain_tpot

        def step(tokens: float) -> float:
            wide = steps.verify_fixed + steps.verify_slope * tokens
            return plain if tokens <= 1 else max(plain, wide + overhead)

        copies = Undrafted(step(1 + self.copies.drafted), self.copies.tokens) if self.copies else None
        costs = RunCosts(steps.draft, step, link.round_trip(of.message_bytes) + of.rpc_s, copies)
        return min(tpot_never_waiting(costs, rate, width) for width in range(length + 1))

    def closed_form(self, name: str, link: LinkSettings) -> float | None:
        """Returns the continuous optimum for one rate at all positions; None if there is none."""
        of, drafts = self.costs[name], self.drafts[name]
        rate = theory.rate_for(drafts.per_round, len(drafts.rates))
        once = of.verify_fixed_s + of.verify_slope_s
        waited = of.round_overhead_s + of.draft_fixed_s
        if arch.COMPARED[name].split:
            waited += of.rpc_s + link.round_trip(of.message_bytes)
        each = of.draft_slope_s + of.verify_slope_s
        cost, wait = ratio(each, once), ratio(waited, once)
        if not 1e-6 < rate < 1 - 1e-6 or not cost or wait is None:
            return None
        best = theory.best_length_closed_form(rate, cost, wait)
        return best if math.isfinite(best) else None

    def break_even_rtt(self, link: LinkSettings, name: str = arch.DISTRIBUTED.name) -> tuple[float, Interval | None]:
        """Returns the round trip below which `name` beats plain decoding at the link's bandwidth.

        The second value is its 95 % interval over prompts, at fixed costs.
        """
        of, drafts = self.costs[name], self.drafts[name]
        g = len(drafts.rates)
        steps = self.steps(name, g)
        fixed = of.verify_fixed_s + of.round_overhead_s + of.rpc_s + link.transfer(of.message_bytes)
        value = theory.break_even_rtt(StepCosts(steps.draft, self.plain_tpot, fixed, of.verify_slope_s), drafts.rates)
        spread = ratio_interval([a for _, a in drafts.by_prompt], [r for r, _ in drafts.by_prompt])
        rest = value - drafts.per_round * self.plain_tpot
        if spread is None:
            return value, None
        return value, (rest + (1 + spread[0]) * self.plain_tpot, rest + (1 + spread[1]) * self.plain_tpot)

    def capacity_gain(self) -> float | None:
        """Returns the capacity of a target with remote drafts over one with local drafts; None if not calibrated."""
        if arch.FUSED.name not in self.costs or self.costs[arch.FUSED.name].verify(self.length) <= 0:
            return None
        return theory.capacity_gain(self.steps(arch.FUSED.name, self.length), self.length)

    def least_tokens_per_round(self, name: str, tpot_s: float) -> float | None:
        """Returns the mean acceptance length below which `name`, now at `tpot_s`, is slower than plain decoding.

        None if plain decoding takes no time.
        """
        return ratio(self.drafts[name].per_round * tpot_s, self.plain_tpot)

    def target_seconds(self, name: str, length: int | None = None) -> float:
        """Returns the busy seconds per token of the target's device, including a draft on the same device."""
        g = self.length if length is None else length
        if name == arch.AUTOREGRESSIVE.name or g == 0:
            return self.plain_s
        of = self.costs[name]
        busy = of.verify(g) + (0.0 if arch.COMPARED[name].split else of.draft(g))
        return busy / theory.expected_tokens_measured(theory.carried_on(self.drafts[name].rates, g))


def _as_defined(tokens: float, per_round: float) -> float:
    """Converts seconds per token to TPOT as defined, for requests of this many tokens."""
    return (tokens - per_round) / (tokens - 1) if tokens > per_round else 1.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted and a measured TPOT. `error`: predicted / measured - 1."""

    architecture: str
    condition: str
    rtt_ms: float
    predicted_tpot_s: float
    measured_tpot_s: float | None

    @property
    def error(self) -> float | None:
        share = ratio(self.predicted_tpot_s, self.measured_tpot_s or 0.0)
        return None if share is None else share - 1

    @property
    def missed(self) -> bool:
        """Whether it is off by more than the factor up to which predictions are relied on."""
        share = None if self.error is None else 1 + self.error
        return share is not None and not 1 / MISSED <= share <= MISSED


@dataclass(frozen=True, slots=True)
class BestLength:
    """`tpot_s_by_length[g]` is the prediction at speculation length g; `length` is the best one."""

    architecture: str
    rtt_ms: float
    closed_form: float | None
    tpot_s_by_length: tuple[float, ...]

    @property
    def length(self) -> int:
        return min(range(len(self.tpot_s_by_length)), key=self.tpot_s_by_length.__getitem__)

    @property
    def tpot_s(self) -> float:
        return self.tpot_s_by_length[self.length]


def best_length(model: Model, name: str, link: LinkSettings) -> BestLength:
    by_length = tuple(model.tpot(name, link, g) for g in model.lengths(name))
    return BestLength(name, 1000 * link.seconds, model.closed_form(name, link), by_length)


def curve(
    model: Model, names: Sequence[str], link: LinkSettings, up_to_ms: float
) -> list[tuple[float, dict[str, float]]]:
    """Returns the predicted TPOT at 41 round trips from 0, at the link's bandwidth."""
    links = (LinkSettings(up_to_ms * i / 40, link.bandwidth_mbps) for i in range(41))
    return [(at.rtt_ms or 0.0, {name: model.tpot(name, at) for name in names}) for at in links]


def crossing(rtts_ms: Sequence[float], differences: Sequence[float]) -> float | None:
    """Returns the round trip (ms) at which a growing difference crosses 0 between two measured links."""
    points = sorted(zip(rtts_ms, differences, strict=True))
    for (left, below), (right, above) in itertools.pairwise(points):
        if below < 0 <= above:
            return left + (right - left) * -below / (above - below)
    return None
