"""Chooses how many tokens to draft ahead for a verifier that never waits, and how many of them its steps verify."""

from __future__ import annotations

import math
from typing import NamedTuple

from tandem.speculation.estimate import Acceptance, Estimate, best_length, expected_by_length
from tandem.speculation.types import Verdict

FADING = 0.98
"""Factor by which each token fades what is known of a request's acceptance."""
UNLIKELY = 0.02
"""A token whose path so far is less likely than this is not drafted."""
MOST_AHEAD = 64
"""The most tokens to draft beyond what is known to be committed."""
REFRESH = 8
"""Steps after which the plan is made again."""
LEAST_GAIN = 1.005
"""How much faster than plain steps the target must be expected to be for drafts to be made."""


class DraftPlan(NamedTuple):
    """How far to draft: `depth` tokens ahead, the first `fresh` of them before any is sent; `width` for each step.

    With a width of 0 nothing is sent.
    """

    depth: int
    fresh: int
    width: int


RESTING = DraftPlan(1, 1, 0)


class LookaheadPolicy:
    """How far to draft for one request. `most`: the most draft tokens that a step verifies.

    `fixed`: the draft tokens of a step, if they are not chosen here; the drafter never rests then.
    """

    def __init__(self, most_width: int, estimate: Estimate, fixed: int | None = None) -> None:
        if most_width < 0:
            raise ValueError(f"lookahead: a step verifies at least 0 draft tokens, not {most_width}")
        self.most = most_width if fixed is None else min(most_width, fixed)
        self._fixed, self.estimate = fixed, estimate
        self._acceptance = Acceptance(estimate.ahead, FADING)
        self._plan: DraftPlan | None = None
        self._since = 0

    @property
    def acceptance(self) -> float:
        """The estimated chance that the target's token is the draft's."""
        return self._acceptance.rates(1)[0]

    def observe(self, hit: bool) -> None:
        """Records whether the target's token was the one drafted for its place."""
        for known in (self._acceptance, self.estimate.ahead):
            known.note(1, hit)

    def waited(self, drafted: int, verdict: Verdict) -> None:
        """Records a round that was waited for."""
        for position in range(min(drafted, verdict.accepted + 1)):
            self.observe(position < verdict.accepted)

    def stepped(self, drafted: int, verdict: Verdict) -> None:
        """Records a step of the run, which verified `drafted` draft tokens."""
        self.estimate.stepped(drafted + 1, verdict)
        self._since += 1

    @property
    def plan(self) -> DraftPlan:
        """How far to draft now."""
        if self._plan is None or self._since >= REFRESH:
            self._plan, self._since = self._choose(), 0
        return self._plan

    def _choose(self) -> DraftPlan:
        known, rate = self.estimate.times, self.acceptance
        if self.most == 0:
            return DraftPlan(0, 0, 0)
        if known is None or not self.estimate.target.known:
            return DraftPlan(2 * self.most, self.most, self.most)
        tokens, seconds = expected_by_length([rate] * self.most), self.estimate.steps(self.most)
        width = self.most if self._fixed is not None else best_length(tokens, seconds, self.estimate.rows)
        late = steps_late(known.rtt, known.draft, seconds[0], width)
        if self._fixed is None and gain(rate, width, late, seconds) < LEAST_GAIN:
            return RESTING
        likely = math.ceil(math.log(UNLIKELY) / math.log(rate))
        depth = max(width, min(math.ceil(late * tokens[width]) + width, likely, MOST_AHEAD))
        return DraftPlan(depth, min(late + width, depth), width)


def steps_late(rtt: float, draft: float, step: float, width: int) -> int:
    """Returns how many plain steps pass before a draft arrives that reaches `width` tokens beyond them.

    `rtt`, `draft`, `step`: seconds of a round trip, of a draft token and of a plain step.
    """
    drafting = min(1.0, draft / max(step, 1e-9))  # what is drafted meanwhile must be drafted too
    ahead = (rtt / max(step, 1e-9) + width * drafting) / max(1e-9, 1 - drafting)
    return max(1, math.ceil(min(ahead, MOST_AHEAD)))


def gain(rate: float, width: int, late: int, seconds: list[float]) -> float:
    """Returns how much faster than plain steps a run is whose drafts arrive `late` steps late.

    After a token that was not drafted, the target steps plainly until `late` tokens in succession were; then its steps
    verify `width` draft tokens, until one is rejected.
    """
    if not width or not seconds[0]:
        return 1.0
    reached = max(1e-9, rate**late)
    plain, drafted = (1 / reached - 1) / (1 - rate), 1 / (1 - rate ** (width + 1))
    return (plain + 1 / (1 - rate)) * seconds[0] / (plain * seconds[0] + drafted * seconds[width])
