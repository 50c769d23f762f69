"""Chooses where a draft for a verifier that never waits branches: at a second choice, with what may follow it.

A branch saves steps if the target rejects the first choice there and draws the second. The tokens that it commits
meanwhile must be the branch's, so only what reaches beyond them is worth anything, and a second choice alone is worth
nothing: by the time that it is verified, the target has drawn it. A branch costs the time of drafting it, in which the
drafter answers no arrival. How often first and second choices are the target's token is learned by their margin.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.speculation.theory import expected_tokens
from tandem.speculation.types import SecondChoice

MOST_BRANCHES = 4
"""Branches of a draft at one time."""
DELAY = 0.5
"""The share of a branch's drafting time by which it delays the next draft, on average."""
GOING_BACK = 2.0
"""Draft steps' time that a drafter takes to leave its path and to come back to it."""
_EDGES = (0.25, 0.5, 1.0, 2.0, 4.0)
_PRIOR_TRIALS = 8.0
_PRIOR_FIRST = (0.45, 0.5, 0.55, 0.65, 0.75, 0.9)
_PRIOR_SECOND = 0.25
"""Of the tokens that are not the first choice."""
_FADING = 0.998


@dataclass(slots=True)
class Choices:
    """Shares of tokens that were the draft's first and its second choice, by its margin between them."""

    _counts: list[list[float]] = field(
        default_factory=lambda: [
            [first * _PRIOR_TRIALS, (1 - first) * _PRIOR_SECOND * _PRIOR_TRIALS, _PRIOR_TRIALS]
            for first in _PRIOR_FIRST
        ]
    )

    def observe(self, choice: SecondChoice, first: bool, second: bool) -> None:
        """Records which of the two was the target's token, if one was."""
        counts = self._counts[_bucket(choice.margin)]
        for i, hit in enumerate((first, second, True)):
            counts[i] = _FADING * counts[i] + hit

    def chances(self, margin: float) -> tuple[float, float]:
        """Returns the chances that the target's token is the first choice, and that it is the second."""
        first, second, trials = self._counts[_bucket(margin)]
        return first / trials, second / trials


@dataclass(frozen=True, slots=True)
class Costs:
    """What decides whether a branch pays: seconds of a draft token and of a target step, and steps that it comes late.

    `rate`: acceptance per token; `width`: the draft tokens of a step.
    """

    draft: float
    step: float
    late: int
    rate: float
    width: int


def saved_steps(offset: int, length: int, costs: Costs) -> float:
    """Returns the target steps that a branch of `length` tokens saves if the target comes to it `offset` tokens on."""
    meanwhile = max(0, costs.late - offset)
    rest, rate = length - meanwhile, min(costs.rate, 0.99)
    if rest < 1 or costs.width < 1:
        return 0.0
    tokens = rate * (1 - rate**rest) / (1 - rate)
    return rate**meanwhile * tokens * (1 - 1 / expected_tokens(rate, min(costs.width, rest)))


def where_to_branch(
    seconds: Sequence[SecondChoice | None], taken: Sequence[int], choices: Choices, length: int, costs: Costs
) -> int | None:
    """Returns the offset at which a branch of `length` tokens after a second choice gains most time, if it gains any.

    `seconds[i]`: the second choice at offset i of the draft; `taken`: offsets that have a branch.
    """
    best, found, reached = DELAY * (length + GOING_BACK) * costs.draft, None, 1.0
    for offset, choice in enumerate(seconds):
        first, second = choices.chances(choice.margin) if choice else (costs.rate, 0.0)
        gain = reached * second * saved_steps(offset, length, costs) * costs.step
        if gain > best and offset not in taken:
            best, found = gain, offset
        reached *= first
    return found


def _bucket(margin: float) -> int:
    return sum(margin >= edge for edge in _EDGES) if math.isfinite(margin) else len(_EDGES)
