"""Estimates conditional acceptance rates online: how likely draft token i is accepted if those before it were."""

from __future__ import annotations

from collections.abc import Sequence

LOWEST, HIGHEST = 0.02, 0.99  # bounds of a prior after it was shifted


class AcceptanceCounts:
    """Counts trials and hits by draft position; each new round multiplies the earlier counts by `fading`."""

    def __init__(self, fading: float) -> None:
        self._fading = fading
        self.trials: list[float] = []
        self.hits: list[float] = []

    def note(self, drafted: int, accepted: int, rounds: int = 1) -> None:
        """Counts a draft of `drafted` tokens, made `rounds` rounds after the last one.

        Tokens after the first rejected one are not trials.
        """
        fade = self._fading**rounds
        grow = [0.0] * (drafted - len(self.trials))
        self.hits = [fade * n for n in self.hits] + grow  # before `trials`, by whose length another thread reads both
        self.trials = [fade * n for n in self.trials] + grow
        for i in range(min(drafted, accepted + 1)):
            self.trials[i] += 1
            self.hits[i] += i < accepted

    def rates(
        self, prior: Sequence[float], together: float, each: float, rounds: int = 0
    ) -> tuple[list[float], list[float]]:
        """Returns, for every position of `prior`, the estimated rate and the number of trials that support it.

        The estimate is for `rounds` rounds after the last draft. A text that is easier or harder than `prior` is so at
        every position, so all trials together first shift the whole prior, which weighs as much as `together` trials.
        Then each position's own trials move its rate, with the shifted prior weighing as much as `each` trials.
        Trials at other positions support a position less than its own do.
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
