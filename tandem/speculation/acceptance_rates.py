"""Conditional acceptance, learned round by round: how likely draft token i is accepted if those before it were."""

from __future__ import annotations

from collections.abc import Sequence

LOWEST, HIGHEST = 0.02, 0.99


class AcceptanceCounts:
    """Trials and successes by position, which fade: after a round everything counted before weighs `fading` times."""

    def __init__(self, fading: float) -> None:
        self._fading = fading
        self.trials: list[float] = []
        self.hits: list[float] = []

    def note(self, drafted: int, accepted: int, rounds: int = 1) -> None:
        """A draft of `drafted` tokens, `rounds` rounds after the last; tokens after a rejected one were no trials."""
        fade = self._fading**rounds
        grow = [0.0] * (drafted - len(self.trials))
        self.trials = [fade * n for n in self.trials] + grow
        self.hits = [fade * n for n in self.hits] + grow
        for i in range(min(drafted, accepted + 1)):
            self.trials[i] += 1
            self.hits[i] += i < accepted

    def rates(
        self, prior: Sequence[float], together: float, each: float, rounds: int = 0
    ) -> tuple[list[float], list[float]]:
        """For every position of `prior`: the rate, and how many trials it rests on; `rounds` after the last draft.

        A text that is easier or harder than `prior` says is so at every position: all trials move the prior, which
        weighs as `together` trials, as one; then each position's own move its rate, and the prior weighs as `each`.
        Trials elsewhere support a position less than its own.
        """
        fade = self._fading**rounds
        seen = list(zip(self.trials, self.hits, prior, strict=False))
        excess = sum(hits - trials * rate for trials, hits, rate in seen)
        evidence = fade * sum(self.trials)
        shift = fade * excess / (evidence + together)
        rates, support = [], []
        for i, rate in enumerate(prior):
            trials, hits = (fade * self.trials[i], fade * self.hits[i]) if i < len(self.trials) else (0.0, 0.0)
            moved = min(HIGHEST, max(LOWEST, rate + shift))
            rates.append((hits + each * moved) / (trials + each))
            support.append(trials + min(evidence, each) / 2)
        return rates, support
