"""Predicts the time per token at a verifier that never waits, by a formula.

The target streams what it commits, and steps on. A draft that is made from an arrival comes R + T_d after it was sent,
where R is the round trip and T_d the time of drafting: s = ceil((R + T_d) / t_1) plain steps later. So after a token
that the drafter missed, the target steps plainly until s tokens in succession were the drafter's choice, which takes
N = (1 - a^s) / ((1 - a) a^s) steps of a token each. From then on every step verifies k draft tokens until one is
missed: 1 / (1 - a^(k+1)) steps, which commit 1 / (1 - a) tokens. The formula is the ratio of the two sums.

If the target copies from the text where no draft has arrived, those steps commit E tokens each, in the time t_E of such
a step: s = (R + T_d) / t_E of them pass, at least one, s E tokens are to be the drafter's choice, and the N steps are
N / E. On average no whole number of them passes: they verify copies of any length, and so take any time around t_E.

It assumes the same acceptance at every position, and drafts that are long enough. Tests compare it with a simulation
(tests/speculation/run_simulation.py). Times are in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tandem.speculation.theory import check_acceptance

MIN_STEP, MOST_STEPS = 1e-9, 1e9
"""Seconds of the shortest step, since what took no measurable time took some, and steps that are as good as endless."""


@dataclass(frozen=True, slots=True)
class Undrafted:
    """A step for which no draft has arrived: its `seconds`, and the `tokens` that it commits, its own included."""

    seconds: float
    tokens: float


@dataclass(frozen=True, slots=True)
class RunCosts:
    """Seconds of a draft step, of a target step by its tokens, and of a round trip.

    `copies`: what a step without a draft is, if it copies from the text (None: it is plain).
    """

    draft: float
    step: Callable[[int], float]
    rtt: float
    copies: Undrafted | None = None

    @property
    def undrafted(self) -> Undrafted:
        return self.copies or Undrafted(self.step(1), 1.0)


def steps_late(costs: RunCosts, fresh: float) -> float:
    """Returns s, the steps that the target makes while `fresh` draft tokens are made and travel; at least 1."""
    steps = min((costs.rtt + fresh * costs.draft) / max(costs.undrafted.seconds, MIN_STEP) - 1e-9, MOST_STEPS)
    return max(1.0, steps if costs.copies else math.ceil(steps))


def plain_steps(acceptance: float, late: float) -> float:
    """Returns N, the expected tokens until `late` in succession were the drafter's choice."""
    if acceptance >= 1:
        return late
    reached = acceptance**late  # may be so near 0 that a product with it is 0
    return math.inf if reached <= 0 else (1 / reached - 1) / (1 - acceptance)


def tpot_never_waiting(costs: RunCosts, acceptance: float, length: int, fresh: int | None = None) -> float:
    """Returns the seconds per token if a step verifies at most `length` draft tokens.

    `fresh`: tokens that are drafted before the first are sent (None: `length` beyond those committed meanwhile).
    """
    check_acceptance(acceptance)
    undrafted = costs.undrafted
    beyond = length + steps_late(costs, length) * undrafted.tokens if fresh is None else fresh
    plain = plain_steps(acceptance, steps_late(costs, beyond) * undrafted.tokens)
    each = undrafted.seconds / undrafted.tokens
    if math.isinf(plain) or length < 1:
        return each
    if acceptance >= 1:
        return costs.step(length + 1) / (length + 1)
    drafted = 1 / (1 - acceptance ** (length + 1))
    return (plain * each + drafted * costs.step(length + 1)) / (plain + 1 / (1 - acceptance))
