"""Draft lengths: fixed, or the one that commits most tokens per second."""

from __future__ import annotations

import itertools
import operator

from tandem.speculation.estimate import (
    REQUEST_FADING,
    TRIAL_SHARE,
    AcceptanceRates,
    Estimate,
    best_length,
    expected_by_length,
    note_draft,
    source_of,
)
from tandem.speculation.types import Draft, LengthPlan, Proposer, Verdict

FIRST = 3  # draft tokens of a process's first round
TRIED = 8  # first rounds that try different lengths, to measure costs
TRIALS_SAVED = 0.4  # most credit for trials, in rounds. A trial slows the rows of its step, which divide both
# Rounds for which a plan lasts, unless all of a draft was wrong: as many as went without drafts before it, within
# these, since choosing, and measuring rounds without drafts, takes the steps' processor time
REFRESH, LONGEST_PLAN = 3, 12
LONGEST_OF_MODEL = 8  # each token of a model costs time; a copy is free
NEXT = 0.75  # probability of a draft token after accepted ones, about


class FixedLength:
    """Draft lengths of one session: always `length`. A policy may choose before the round under way is reported."""

    def __init__(self, length: int) -> None:
        if length < 0:
            raise ValueError(f"speculation_length: {length} is below 0")
        self._most = length

    def choose(self, remaining: int) -> LengthPlan:
        """Returns a length of 0 to `remaining` - 1; `remaining` >= 1 tokens are left."""
        length = min(self._most, remaining - 1)
        return LengthPlan(length, length)

    def observe(self, requested: int, draft: Draft, verdict: Verdict, seconds: float) -> None:
        """Reports the oldest unreported round, of `requested` draft tokens and `seconds` in all."""


class AdaptiveLength(FixedLength):
    """Lengths of at most `most` for one session; sessions share `estimate`."""

    def __init__(self, most: int, estimate: Estimate) -> None:
        super().__init__(most)
        self._estimate = estimate
        self._acceptance = {
            source: AcceptanceRates(known, REQUEST_FADING) for source, known in estimate.acceptance.items()
        }
        self._continued = AcceptanceRates(estimate.continued, REQUEST_FADING)
        self._plan, self._lasts, self._undrafted = LengthPlan(0, 0), 0, 0  # for so many rounds; rounds without drafts
        self._credit, self._trial = 0.0, 0.0  # seconds that trials may cost, and that one does
        self._tries = False  # a trial was chosen

    def choose(self, remaining: int) -> LengthPlan:
        if self._lasts and self._plan.k < remaining and (self._plan.model_k or self._credit < self._trial):
            return self._plan
        most, rounds = min(self._most, remaining - 1), self._estimate.rounds
        if most < 1:
            return LengthPlan(0, 0)
        if rounds < TRIED or not self._estimate.target.known:
            first = min(most, (FIRST, 0, min(LONGEST_OF_MODEL, self._most), 1)[rounds % 4])
            return LengthPlan(first, first, lasts=False)
        copied, of_copies, _ = self._best(Proposer.NGRAM, most)
        model, of_model, least = self._best(Proposer.MODEL, min(LONGEST_OF_MODEL, most))
        if not model and self._credit >= self._trial:
            self._tries = True
            return LengthPlan(max(1, copied), 1, False, of_copies, of_model[:1])
        self._plan = LengthPlan(copied, model, True, of_copies, of_model, least)
        self._lasts = min(max(REFRESH, self._undrafted), LONGEST_PLAN)
        return self._plan

    def _best(self, source: Proposer, most: int) -> tuple[int, tuple[float, ...], float]:
        # Returns fields of a plan: the length, the probabilities by position, and `least`
        known = self._estimate
        rates, drafted = self._acceptance[source].rates(most), [*range(most + 1)]
        if source is Proposer.MODEL:  # whose first token is always drafted
            drafted = [n - 1.0 for n in expected_by_length([1.0, *self._continued.rates(most)[1:]])]
        costs = [known.steps(0)[0] + known.rest.at(0), *known.rounds_with(source, drafted[1:])]
        self._trial = costs[1] - costs[0]  # of a model's, whose lengths are chosen last
        tokens, co_batched = expected_by_length(rates), known.rows * known.committed
        best = best_length(tokens, costs, co_batched)
        price = known.draft.slope + known.target.slope
        least = min(1.0, price * (tokens[best] + co_batched) / max(costs[best], 1e-9) / NEXT)
        return best, tuple(itertools.accumulate(rates, operator.mul)), least

    def observe(self, requested: int, draft: Draft, verdict: Verdict, seconds: float) -> None:
        if draft.ahead:
            return  # such a round's time says nothing about one that waits for its draft
        each, drafted = seconds / verdict.rows, len(draft.token_ids)
        wrong, emptied = drafted > verdict.accepted == 0, 2 * verdict.rows < self._estimate.rows + 1  # most rows gone
        if drafted or emptied or self._lasts <= 1:
            self._estimate.observe(draft, verdict, seconds)
        self._undrafted = 0 if drafted else self._undrafted + 1
        self._credit = min(self._credit + TRIAL_SHARE * each, max(TRIALS_SAVED * each, self._trial))
        self._lasts = 0 if emptied or wrong else max(0, self._lasts - 1)
        if drafted:
            note_draft(self._acceptance, self._continued, draft, verdict.accepted)
        if (wrong and source_of(draft) is Proposer.MODEL) or (self._tries and not drafted):  # a full step cut the draft
            self._credit = max(0.0, self._credit - self._trial)
        self._tries = False
