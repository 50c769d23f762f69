"""Judges by measurement whether drafting for a target that never waits pays at all.

Drafts that come late cost the target nothing, unless the drafter shares its machine: then every step takes longer,
whether a draft is used or not. So plain steps are timed while drafts are made and while none are, and the tokens that
steps really commit are held against the theory's, whose acceptance is the same at every place. Times are arguments; no
clock is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.speculation.step_times import FEW, RecentMedian

STALE = 400
"""Plain steps after which a time of the other kind counts as unknown again."""
PRIOR_EXCESS = 5.0
"""Weight of the prior that theory keeps its promises, in tokens beyond one a step."""
FADING, FORGETTING = 0.99, 0.995
"""Factors by which a step beside drafting, and one without, fade earlier tokens committed and promised."""


@dataclass(slots=True)
class Contention:
    """What drafting costs plain steps, and what it gains, as the requests of a process measured."""

    _drafting: RecentMedian = field(default_factory=RecentMedian)
    _resting: RecentMedian = field(default_factory=RecentMedian)
    _steps: int = 0
    _gained: float = PRIOR_EXCESS
    _promised: float = PRIOR_EXCESS

    def plain_step(self, resting: bool, seconds: float) -> None:
        """Records a plain step of no other row, made while nothing was drafted (`resting`) or while drafts were."""
        self._steps += 1
        if resting:  # other text may be drafted better
            self._gained = FORGETTING * self._gained + (1 - FORGETTING) * PRIOR_EXCESS
            self._promised = FORGETTING * self._promised + (1 - FORGETTING) * PRIOR_EXCESS
        (self._resting if resting else self._drafting).note(seconds, self._steps)

    def unknown(self, resting: bool) -> bool:
        """Returns whether too few such steps were timed, or too long ago."""
        of = self._resting if resting else self._drafting
        return len(of) < FEW or self._steps - of.noted_at > STALE

    @property
    def slowdown(self) -> float:
        """How much longer plain steps take while drafts are made; 1 until both were timed."""
        drafting, resting = self._drafting.median, self._resting.median
        if not drafting or not resting or self.unknown(True) or self.unknown(False):
            return 1.0
        return max(1.0, drafting / resting)

    def committed(self, tokens: int, expected: float) -> None:
        """Records a step while drafting was done: the `tokens` that it committed and those that theory promised."""
        self._gained = FADING * self._gained + tokens - 1
        self._promised = FADING * self._promised + max(0.0, expected - 1)

    def gain(self, expected: float) -> float:
        """Returns how much faster drafting is than not drafting, where theory promises `expected` times."""
        believed = self._gained / self._promised if self._promised > 0 else 1.0
        return (1 + (expected - 1) * believed) / self.slowdown
