"""Implements the cost formulas of speculative decoding that measurements are compared with. Times are in seconds.

Symbols of the papers: a acceptance rate per token (a_i given that those before were accepted), g speculation length,
t_d a draft step, t_v a verification, t_ar a plain target step, c = t_d / t_v, r = RTT / t_v. Sources: Leviathan et al.
2023 (expected tokens, optimal length), arXiv 2606.25091 (break-even RTT and capacity of a distributed draft). The
closed form with a round trip and the pipelined bound were derived for this project and are checked by tests against
the integer optimum and a simulation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass


def expected_tokens(acceptance: float, length: int) -> float:
    """Returns (1 - a^(g+1)) / (1 - a), the tokens per round with the same acceptance rate at every position."""
    check_acceptance(acceptance)
    if acceptance == 1:
        return length + 1.0
    return (1 - acceptance ** (length + 1)) / (1 - acceptance)


def expected_tokens_measured(conditional: Sequence[float]) -> float:
    """Returns the tokens per round for measured rates a_1, a_2, ... (each given that those before were accepted)."""
    for rate in conditional:
        check_acceptance(rate)
    return 1.0 + sum(itertools.accumulate(conditional, lambda done, rate: done * rate))


def rate_for(tokens: float, length: int) -> float:
    """Returns the acceptance rate at which a round of `length` drafts gives `tokens` expected tokens, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, length) < tokens else (low, middle)
    return (low + high) / 2


def carried_on(conditional: Sequence[float], length: int) -> list[float]:
    """Returns rates for `length` positions: the measured ones, then the last of them repeated."""
    return [*conditional[:length], *list(conditional[-1:]) * (length - len(conditional))]


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Measured seconds: a draft step, a plain target step, and a verification of n positions as fixed + n * slope."""

    draft: float
    plain: float
    verify_fixed: float
    verify_slope: float = 0.0

    def __post_init__(self) -> None:
        if not all(math.isfinite(s) and s >= 0 for s in (self.draft, self.plain, self.verify_fixed, self.verify_slope)):
            raise ValueError(f"step costs: {self} has a time that is not a finite number of seconds >= 0")

    def verify(self, length: int) -> float:
        """Returns the seconds of a round's target step: `length` draft tokens and the one before them."""
        return self.verify_fixed + self.verify_slope * (length + 1)


def tpot_fused(costs: StepCosts, conditional: Sequence[float], overhead: float = 0.0) -> float:
    """Returns (g t_d + t_v + o) / E, the time per token without a network; g is the number of rates given."""
    g = len(conditional)
    return (g * costs.draft + costs.verify(g) + overhead) / expected_tokens_measured(conditional)


def tpot_stop_and_wait(
    costs: StepCosts, conditional: Sequence[float], rtt: float, transfer: float = 0.0, overhead: float = 0.0
) -> float:
    """Returns (g t_d + RTT + transfer + t_v + o) / E, the time per token with one round in flight.

    `transfer`: bytes / bandwidth, both ways together.
    """
    _check_rtt(rtt)
    return tpot_fused(costs, conditional, overhead) + (rtt + transfer) / expected_tokens_measured(conditional)


def tpot_pipelined(costs: StepCosts, acceptance: float, rtt: float) -> float:
    """Returns t_d + (1 - a)(RTT + t_v): the draft never waits, and only a miss pays the round trip.

    This is a lower bound: it assumes unlimited rounds in flight, and verifications no slower than drafting.
    """
    check_acceptance(acceptance)
    _check_rtt(rtt)
    return costs.draft + (1 - acceptance) * (rtt + costs.verify(0))


def break_even_rtt(costs: StepCosts, conditional: Sequence[float]) -> float:
    """Returns E t_ar - t_v - g t_d, the round trip below which a remote draft beats plain decoding; negative: never."""
    g = len(conditional)
    return expected_tokens_measured(conditional) * costs.plain - costs.verify(g) - g * costs.draft


def capacity_gain(costs: StepCosts, length: int) -> float:
    """Returns 1 + g t_d / t_v: clients one target can serve with remote drafts, relative to drafts next to it."""
    if costs.verify(length) <= 0:
        raise ValueError("step costs: a verification that takes no time limits no clients")
    return 1 + length * costs.draft / costs.verify(length)


def best_length_closed_form(acceptance: float, cost_ratio: float, rtt_ratio: float = 0.0) -> float:
    """Returns the continuous optimum g* = (-A - W_-1(-e^-A)) / L - 1 with L = -ln a, A = 1 + L (1 + r - c) / c.

    It solves a^(g+1) [L (g c + 1 + r) + c] = c. For a slope in t_v, give c + slope / fixed as `cost_ratio`.
    """
    check_acceptance(acceptance)
    _check_rtt(rtt_ratio)
    if not 0 < acceptance < 1:
        raise ValueError(f"acceptance: {acceptance} has no finite best length")
    if cost_ratio <= 0:
        raise ValueError(f"cost ratio: {cost_ratio} must be above 0")
    decay = -math.log(acceptance)
    a = 1 + decay * (1 + rtt_ratio - cost_ratio) / cost_ratio
    if a <= 1:
        return -1.0 if a < 1 else 0.0  # drafting costs as much as verifying: nothing to gain
    return (-a - _lambert_lower(a)) / decay - 1


def _lambert_lower(a: float) -> float:
    """Returns W_-1(-e^-a) for a > 1: the solution w < -1 of w e^w = -e^-a, by Newton on w + ln(-w) = -a."""
    w = -a - math.log(a) if a > 2 else -1 - math.sqrt(2 * (a - 1))
    for _ in range(60):
        step = (w + math.log(-w) + a) / (1 + 1 / w)
        w = min(w - step, -1 - 1e-12)
        if abs(step) < 1e-13 * abs(w):
            break
    return w


def check_acceptance(value: float) -> None:
    """Raises ValueError if an acceptance rate is outside [0, 1]."""
    if not 0 <= value <= 1:
        raise ValueError(f"acceptance: {value} is outside [0, 1]")


def _check_rtt(value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"rtt: {value} is not a finite time >= 0")
