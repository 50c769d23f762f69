"""Tracks each remote verification mode's measured time per token, as a ratio to what its formula predicts.

The formulas know one acceptance for every place, and no time but that of drafts, steps and the network: where draft and
target share cores, or where right drafts come in runs, a way may take far longer, or less long, than they say.
"""

from __future__ import annotations

from dataclasses import dataclass

PRIOR_TOKENS = 48.0
"""The weight, in tokens, of what is assumed of a way before it was measured."""
PRIOR_RUNNING = 1.1
"""A target that never waits is assumed to take longer than expected: at loopback it took 1.05 to 1.2 times as long,
because right drafts come in runs, and a draft that is late by a moment is late by a step."""
FADING = 0.998
"""Factor by which each token, of either way, fades what was measured before it: a way that was slow is tried again."""


@dataclass(slots=True)
class ModeRatio:
    """Measured seconds per token of one way, as a ratio to the expected ones, of the requests of a process."""

    prior: float = 1.0
    weighed: float = 0.0
    tokens: float = 0.0

    def fade(self, tokens: int) -> None:
        """Fades what was measured before `tokens` tokens, of either way."""
        kept = FADING**tokens
        self.weighed, self.tokens = kept * self.weighed, kept * self.tokens

    def note(self, tokens: int, ratio: float) -> None:
        """Records that `tokens` tokens took `ratio` times what was expected."""
        self.weighed += tokens * ratio
        self.tokens += tokens

    @property
    def value(self) -> float:
        return (PRIOR_TOKENS * self.prior + self.weighed) / (PRIOR_TOKENS + self.tokens)
