"""Predicts each architecture's time per token from the component times of the run.

Component times come from calibration requests on the base's link (tandem/comparison/analysis/costs.py), acceptance from
the base's measured requests; TPOT on every other link is a true prediction. TPOT = (E2E - TTFT) / (n - 1) excludes the
time of the first chunk but not all of its tokens: a request of n tokens in rounds of E tokens has n / E - 1 rounds
after the first, and predictions follow that definition.

Where lengths were chosen by measurement (auto), they and E differ from link to link. Each link is then predicted from
the lengths and the E of its own requests: a round costs the mean of what rounds of these lengths cost. Fixed lengths
are predicted from the acceptance in calibration requests, which had fixed lengths: auto drafts much where much is
accepted, so that its own rounds would promise too much.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tandem.comparison.analysis.bootstrap import Interval, ratio_interval
from tandem.comparison.analysis.costs import ArchitectureCosts
from tandem.comparison.analysis.doubt import MISSED
from tandem.comparison.analysis.drafts import Copied, Drafted
from tandem.comparison.links.settings import LinkSettings
from tandem.comparison.measuring import architectures as arch
from tandem.comparison.measuring.distributions import ratio
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
NOTES_ON_AUTO = (
    "With lengths chosen by measurement (auto), the lengths and the tokens of a round are those of each link's own"
    " requests, and only the cost of a round of each length is predicted.",
    "The curves and the break-even are those of the lengths in the base: at other round trips auto may choose others,"
    " and be faster than they say.",
    "Fixed lengths, a target that never waits and pipelined decoding take the acceptance in the calibrating requests.",
)


@dataclass(frozen=True, slots=True)
class Model:
    """The inputs of predictions. `plain_s`: seconds of a plain target step; `length`: the measured one, None if auto.

    `copies`: those of lookup alone, if it was measured. `at_fixed`: with auto, the rates at fixed lengths.
    """

    plain_s: float
    costs: Mapping[str, ArchitectureCosts]
    drafts: Mapping[str, Drafted]
    length: int | None
    copies: Copied | None = None
    at_fixed: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def steps(self, name: str, length: int) -> StepCosts:
        of = self.costs[name]
        return StepCosts(of.draft(length) / max(1, length), self.plain_s, of.verify_fixed_s, of.verify_slope_s)

    def lengths(self, name: str) -> range:
        """Returns the speculation lengths from 0 to the longest that was calibrated or measured."""
        return range(int(max([self.length or 0, *self.costs[name].draft_s_by_length])) + 1)

    def rates(self, name: str) -> tuple[float, ...]:
        """Returns the acceptance that a fixed length is predicted from."""
        return self.at_fixed.get(name, self.drafts[name].rates)

    def round_parts(self, name: str, length: int | None = None) -> tuple[float, float]:
        """Returns the seconds of a round's draft and verification; without a length, the means of its rounds."""
        of = self.costs[name]
        rounds = enumerate(self.drafts[name].rounds_by_length) if length is None else [(length, 1)]
        parts = [(n * of.draft(g), n * of.verify(g), n) for g, n in rounds if n]
        draft, verify, total = map(sum, zip(*parts, strict=True))
        return draft / total, verify / total

    @property
    def plain_tpot(self) -> float:
        of = self.costs.get(arch.AUTOREGRESSIVE.name)
        return self.plain_s + (of.round_overhead_s if of else 0.0)

    def tpot(self, name: str, link: LinkSettings, length: int | None = None) -> float:
        """Returns the predicted seconds per output token; at no `length`, as it was measured."""
        g = self.length if length is None else length
        if name == arch.AUTOREGRESSIVE.name or g == 0:
            return self.plain_tpot
        overlaps = name in (arch.PIPELINED.name, arch.NEVER_WAITING.name)
        base = arch.DISTRIBUTED.name if overlaps else name
        of, drafts = self.costs[base], self.drafts[base]
        if g is None and not overlaps:
            seconds = sum(self.round_parts(base)) + of.round_overhead_s + self._apart(base, link)
            return seconds / drafts.per_round * _as_defined(drafts.tokens, drafts.per_round)
        g = self.lengths(base)[-1] if g is None else g
        steps = self.steps(base, g)
        rates = theory.carried_on(self.rates(base), g)
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

    def _apart(self, name: str, link: LinkSettings) -> float:
        """Returns the seconds that a round waits for the other side, on average over the lengths of its rounds."""
        of, counts = self.costs[name], self.drafts[name].rounds_by_length
        # A target whose draft is elsewhere asks nobody in a round without one; a draft always asks its target.
        asking = 1 - counts[0] / sum(counts) if name == arch.REMOTE_DRAFT.name else 1.0
        return asking * (link.round_trip(of.message_bytes) + of.rpc_s) if arch.COMPARED[name].split else 0.0

    def _never_waiting(self, link: LinkSettings, length: int, rate: float) -> float:
        """Returns the predicted seconds per token of a target that never waits, from the costs of rounds that wait."""
        of, steps = self.costs[arch.DISTRIBUTED.name], self.steps(arch.DISTRIBUTED.name, length)
        step, copies = self._step(arch.DISTRIBUTED.name), self._copying(arch.DISTRIBUTED.name)
        costs = RunCosts(steps.draft, step, link.round_trip(of.message_bytes) + of.rpc_s, copies)
        return min(tpot_never_waiting(costs, rate, width) for width in range(length + 1))

    def lookup(self) -> Undrafted | None:
        """Returns what a step of lookup alone is predicted to be; None if lookup was not measured."""
        names = sorted(self.drafts, key=lambda name: name != arch.DISTRIBUTED.name)
        return self._copying(names[0]) if names else None

    def _copying(self, name: str) -> Undrafted | None:
        step = self._step(name)
        return Undrafted(step(1 + self.copies.drafted), self.copies.tokens) if self.copies else None

    def _step(self, name: str) -> Callable[[float], float]:
        """Returns the seconds of a target's step by its tokens, from the costs of an architecture that drafts."""
        of, plain = self.costs[name], self.plain_tpot
        overhead = plain - self.plain_s

        def step(tokens: float) -> float:
            wide = of.verify_fixed_s + of.verify_slope_s * tokens
            return plain if tokens <= 1 else max(plain, wide + overhead)

        return step

    def closed_form(self, name: str, link: LinkSettings) -> float | None:
        """Returns the continuous optimum for one rate at all positions; None if there is none."""
        of, rates = self.costs[name], self.rates(name)
        rate = theory.rate_for(theory.expected_tokens_measured(rates), len(rates))
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
        rounds_take = sum(self.round_parts(name, None if self.length is None else len(drafts.rates)))
        fixed = rounds_take + of.round_overhead_s + of.rpc_s + link.transfer(of.message_bytes)
        value = theory.break_even_rtt(StepCosts(0.0, self.plain_tpot, fixed), drafts.rates)
        spread = ratio_interval([a for _, a in drafts.by_prompt], [r for r, _ in drafts.by_prompt])
        rest = value - drafts.per_round * self.plain_tpot
        if spread is None:
            return value, None
        return value, (rest + (1 + spread[0]) * self.plain_tpot, rest + (1 + spread[1]) * self.plain_tpot)

    def capacity_gain(self) -> float | None:
        """Returns the capacity of a target with remote drafts over one with local drafts; None if not calibrated."""
        if arch.FUSED.name not in self.costs or (self.length is None and arch.FUSED.name not in self.drafts):
            return None
        draft, verify = self.round_parts(arch.FUSED.name, self.length)
        return theory.capacity_gain(StepCosts(draft, self.plain_s, verify), 1) if verify > 0 else None

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
        draft, verify = self.round_parts(name, g)
        busy = verify + (0.0 if arch.COMPARED[name].split else draft)
        if g is None:
            return busy / self.drafts[name].per_round
        return busy / theory.expected_tokens_measured(theory.carried_on(self.rates(name), g))


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
