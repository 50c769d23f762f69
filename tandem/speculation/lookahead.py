"""How many tokens to draft ahead for a verifier that never waits, and how many a step verifies."""

from __future__ import annotations

import math
from typing import NamedTuple

from tandem.speculation.estimate import AcceptanceRates, Estimate, best_length, expected_by_length
from tandem.speculation.types import Verdict

FADING = 0.98  # decay of a request's acceptance, per token
UNLIKELY = 0.02  # a path less likely than this is not drafted
MOST_AHEAD = 64  # tokens beyond those known to be committed
REFRESH = 8  # steps between plans
LEAST_GAIN = 1.005  # expected speedup of the target that drafts need


class DraftPlan(NamedTuple):
    depth: int  # tokens ahead
    fresh: int  # tokens drafted before any is sent
    width: int  # draft tokens per step; 0: nothing is sent


RESTING = DraftPlan(1, 1, 0)


class LookaheadPolicy:
    """Plans drafting for one request, with steps of at most `most_width` draft tokens, or of `fixed` without rest.

    `given`: the plan, chosen elsewhere.
    """

    def __init__(
        self, most_width: int, estimate: Estimate, fixed: int | None = None, given: DraftPlan | None = None
    ) -> None:
        if most_width < 0:
            raise ValueError(f"lookahead: a step verifies at least 0 draft tokens, not {most_width}")
        self.most = most_width if fixed is None else min(most_width, fixed)
        self._fixed, self.estimate, self.given = fixed, estimate, given
        self._acceptance = AcceptanceRates(estimate.ahead, FADING)
        self._plan: DraftPlan | None = None
        self._since = 0

    @property
    def acceptance(self) -> float:
        return self._acceptance.rates(1)[0]

    def observe(self, hit: bool) -> None:
        """Records whether a token drafted ahead was right."""
        for known in (self._acceptance, self.estimate.ahead):
            known.note(1, hit)

    def waited(self, drafted: int, verdict: Verdict) -> None:
        for position in range(min(drafted, verdict.accepted + 1)):
            self.observe(position < verdict.accepted)

    def stepped(self, drafted: int, verdict: Verdict) -> None:
        self.estimate.stepped(drafted + 1, verdict)
        self._since += 1

    @property
    def plan(self) -> DraftPlan:
        if self.given:
            return self.given
        if self._plan is None or self._since >= REFRESH:
            self._plan, self._since = self._choose(), 0
        return self._plan

    def _choose(self) -> DraftPlan:
        known, rate = self.estimate, self.acceptance
        if self.most == 0:
            return DraftPlan(0, 0, 0)
        if not (known.timed and known.target.known):
            return DraftPlan(2 * self.most, self.most, self.most)
        tokens, seconds = expected_by_length([rate] * self.most), known.steps(self.most)
        width = self.most if self._fixed is not None else best_length(tokens, seconds, known.rows)
        late = steps_late(known.rtt, known.draft_token, seconds[0], width)
        if self._fixed is None and gain(rate, width, late, seconds) < LEAST_GAIN:
            return RESTING
        likely = math.ceil(math.log(UNLIKELY) / math.log(rate))
        depth = max(width, min(math.ceil(late * tokens[width]) + width, likely, MOST_AHEAD))
        return DraftPlan(depth, min(late + width, depth), width)


def steps_late(rtt: float, draft: float, step: float, width: int) -> int:
    """Returns the plain steps before a draft arrives that reaches `width` tokens beyond them. Arguments in seconds."""
    drafting = min(1.0, draft / max(step, 1e-9))  # what is drafted meanwhile must be drafted too
    ahead = (rtt / max(step, 1e-9) + width * drafting) / max(1e-9, 1 - drafting)
    return max(1, math.ceil(min(ahead, MOST_AHEAD)))


def gain(rate: float, width: int, late: int, seconds: list[float]) -> float:
    """Returns the speedup over plain steps of a run whose drafts arrive `late` steps late."""
    if not width or not seconds[0]:
        return 1.0
    reached = max(1e-9, rate**late)  # drafts resume after `late` right tokens in succession
    plain, drafted = (1 / reached - 1) / (1 - rate), 1 / (1 - rate ** (width + 1))
    return (plain + 1 / (1 - rate)) * seconds[0] / (plain * seconds[0] + drafted * seconds[width])
