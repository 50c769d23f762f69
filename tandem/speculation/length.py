"""How many draft tokens a round asks for: a fixed number, or what measurements say commits most tokens per second.

Choosing maximises tokens / seconds, those of the rows that share the steps included, over the mix of rounds that copies
answer (free, longer) and rounds that the draft model answers (a cost per token, shorter). With the best rate r so far,
each kind of round takes the length that maximises tokens - r * seconds, and r is what they give together: Dinkelbach's
method, the renewal-reward optimum. Pure: no clock, no chance; seconds are arguments.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tandem.speculation.acceptance_rates import HIGHEST, AcceptanceCounts
from tandem.speculation.round_statistics import ALONE, RoundStatistics, proposer_of, without_queue
from tandem.speculation.types import Draft, DraftLimit, Proposer, Verdict

FIRST = 3
"""Draft tokens of the very first round of a process."""
TRIED = 8
"""A process's first rounds: they try lengths far apart, so that costs are known."""
FADING = 0.96
"""Of what a session knows about its acceptance, a round: it rests on the last 25 rounds or so."""
TOGETHER, EACH = 3.0, 3.0
"""Trials that the process's acceptance weighs beside a session's own: at all positions together, and at each."""
STALE_AFTER = 8
"""Rounds without a draft in which what is known about acceptance is taken to be as good as new."""
TRIALS_AT_FIRST, TRIALS_ON = 0.75, 0.01
"""What trials may cost a session: plain rounds at its beginning, and a share of its time from then on. Rows that share
steps share this too: all of them pay for a trial of one."""
PLAIN_AFTER = 64
"""Rounds of a process after which a plain one is measured again, as a trial: else drafting would never be left."""
CATCHES_UP = 8
"""Tokens without a draft after which the draft model has so much to catch up on that its time says little."""


class LengthPolicy(Protocol):
    """Says for one session how long the next draft may be, and hears what became of it.

    It may be asked for a round before it hears of the one that is under way.
    """

    def choose(self, remaining: int) -> int:
        """Draft tokens to ask for, 0 to `remaining` - 1, where `remaining` >= 1 tokens may still be produced."""

    def observe(self, asked: int, draft: Draft, verdict: Verdict, seconds: float) -> None:
        """The oldest round not heard of yet: it asked for `asked` draft tokens, and took so many seconds as a whole."""


@dataclass(frozen=True, slots=True)
class FixedLength:
    """The same length every round."""

    length: int

    def __post_init__(self) -> None:
        if self.length < 0:
            raise ValueError(f"speculation_length: {self.length} is below 0")

    def choose(self, remaining: int) -> int:
        return min(self.length, remaining - 1)

    def observe(self, asked: int, draft: Draft, verdict: Verdict, seconds: float) -> None:
        """Nothing to learn."""


class Plan(NamedTuple):
    """Lengths for copies and for the model's drafts, and what they bring: tokens and seconds of a mean round.

    Both 0: nobody is asked. `company`: tokens that the rows beside this one bring meanwhile.
    """

    copied: int
    model: int
    tokens: float
    seconds: float
    company: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens a second, of all rows: one that drafts makes its neighbours wait."""
        return (self.tokens + self.company) / self.seconds


class Costs(NamedTuple):
    """Seconds: a verification of n tokens (verify[n]), a draft of n (draft[n]), and the rest of a round.

    The verification is that of the step that others share, who commit `company` tokens by it. Of a draft step that
    others share, the row's part: it costs the same for all of them, and would never pay for the first that wants it.
    """

    verify: Sequence[float]
    draft: Sequence[float]
    undrafted: float
    drafted: float
    company: float = 0.0

    @property
    def plain(self) -> float:
        """A round without a draft."""
        return self.verify[1] + self.undrafted

    @property
    def drafting(self) -> list[float]:
        """A draft of n and its verification."""
        return [v + d for v, d in zip(self.verify[1:], self.draft, strict=False)]


class Mix(NamedTuple):
    """Of rounds that ask for a draft: how many a copy answers, and how many of the others nobody does."""

    copied: float
    empty: float


def expected_tokens(rates: Sequence[float]) -> list[float]:
    """Tokens of a round, by draft length from 0: the target's own, and every draft token that is accepted."""
    tokens, reached = [1.0], 1.0
    for rate in rates:
        reached *= rate
        tokens.append(tokens[-1] + reached)
    return tokens


def value(copied: int, model: int, copies: Sequence[float], models: Sequence[float], costs: Costs, mix: Mix) -> Plan:
    """Two lengths with what they bring, if a round commits `copies[n]` or `models[n]` tokens of a draft of n."""
    if not copied and not model:
        return Plan(0, 0, 1.0, costs.plain, costs.company)
    c, e = mix.copied, mix.empty if model else 0.0
    seconds_copied = costs.verify[copied + 1]
    seconds_model = (1 - e) * (costs.verify[model + 1] + costs.draft[model]) + e * costs.verify[1]
    tokens = c * copies[copied] + (1 - c) * (e + (1 - e) * models[model])
    seconds = costs.drafted + c * seconds_copied + (1 - c) * seconds_model
    return Plan(copied, model, tokens, seconds, costs.company)


def best_plan(copies: Sequence[float], models: Sequence[float], costs: Costs, mix: Mix) -> Plan:
    """The lengths that bring most tokens per second."""
    best = value(0, 0, copies, models, costs, mix)
    verify, drafting = costs.verify[1:], costs.drafting
    for _ in range(4):
        copied = _most_gained(copies, verify, best.rate)
        model = _most_gained(models, drafting, best.rate)
        found = value(copied, model, copies, models, costs, mix)
        if found.rate <= best.rate * (1 + 1e-9):
            break
        best = found
    return best


def _most_gained(tokens: Sequence[float], seconds: Sequence[float], rate: float) -> int:
    gained = [t - rate * s for t, s in zip(tokens, seconds, strict=False)]
    return gained.index(max(gained))


class _Choice(NamedTuple):
    """What was chosen for a round: its length, what of it is the model's, and the best rate where it is a trial.

    `company`: what its neighbours were thought to commit meanwhile.
    """

    length: int
    model: int
    trial_rate: float | None = None
    company: float = 0.0


class AdaptiveLength:
    """Lengths for one session, at most `most`; what it learns about costs it shares through `experience`.

    Copies may be longer than the draft model's tokens: `choose` gives the longer, and `limit` says what of it is the
    model's. Where nothing is drafted because it does not pay, evidence fades, so that after a while it might pay again;
    trying that out is paid from a small share of the session's time (a failed trial is charged to it, one that
    succeeds pays for itself), so trials that fail grow rare, and ones that succeed follow each other.
    """

    def __init__(self, most: int, experience: RoundStatistics, limit: DraftLimit | None = None) -> None:
        self._most, self._experience = most, experience
        self._limit = limit if limit is not None else DraftLimit()
        self._prior = {proposer: experience.rates(proposer, most) for proposer in Proposer}
        self._counts = {proposer: AcceptanceCounts(FADING) for proposer in Proposer}
        self._quiet = dict.fromkeys(Proposer, 0)  # rounds since this one's last draft
        self._asked, self._copied = 5.0, 5.0 * experience.copied
        self._asked_model, self._empty = 1.0, 0.0
        self._undrafted_tokens = 0
        self._tokens_known: dict[Proposer, tuple[list[float], list[float]]] = {}
        self._allowance: float | None = None
        self._chosen: deque[_Choice] = deque()

    def choose(self, remaining: int) -> int:
        most = min(self._most, remaining - 1)
        choice = self._choose(most) if most > 0 else _Choice(0, 0)
        self._chosen.append(choice)
        self._limit.model = choice.model
        return choice.length

    def _choose(self, most: int) -> _Choice:
        if self._experience.rounds < TRIED or not self._experience.verify.steps:
            first = min(most, (min(FIRST, self._most), 0, self._most, 1)[self._experience.rounds % 4])
            return _Choice(first, first)
        plan, trial_rate = self._plan(most)
        return _Choice(max(plan.copied, plan.model), plan.model, trial_rate, plan.company)

    def _plan(self, most: int) -> tuple[Plan, float | None]:
        """The lengths to use, and where they are a trial the rate of those that seem best."""
        costs, mix = self._costs(most), Mix(self._copied / self._asked, self._empty / self._asked_model)
        if self._allowance is None:
            self._allowance = TRIALS_AT_FIRST * costs.plain / (1 + self._experience.neighbours)
        copies, hoped_copies = self._tokens(Proposer.NGRAM, most)
        models, hoped_models = self._tokens(Proposer.MODEL, most)
        plan = best_plan(copies, models, costs, mix)
        hoped = best_plan(hoped_copies, hoped_models, costs, mix)
        if hoped.copied > plan.copied or hoped.model > plan.model:
            trial = value(hoped.copied, hoped.model, copies, models, costs, mix)
            if trial.seconds - (trial.tokens + trial.company) / plan.rate <= self._allowance:
                return hoped, plan.rate
        overdue = max(plan.copied, plan.model) and self._experience.rounds_since_plain >= PLAIN_AFTER
        plain = value(0, 0, copies, models, costs, mix)
        if overdue and plain.seconds - (plain.tokens + plain.company) / plan.rate <= self._allowance:
            return plain, plan.rate
        return plan, None

    def _costs(self, most: int) -> Costs:
        experience = self._experience
        undrafted, drafted = experience.seconds_beside
        rows = 1 + round(experience.neighbours)
        draft = experience.draft.table(rows, self._most) if experience.draft.steps else (0.0,) * (self._most + 1)
        verify = experience.verify.table(ALONE, self._most + 1, round(experience.beside))
        company = experience.neighbours * experience.committed
        others = experience.drafting * (rows - 1) / rows
        shares = (0.0, *(seconds / rows for seconds in draft[1:]))
        return Costs(verify, shares, undrafted + others, drafted + others, company)

    def _tokens(self, proposer: Proposer, most: int) -> tuple[list[float], list[float]]:
        """Expected tokens by draft length, as estimated and as hoped."""
        since = self._quiet[proposer] // STALE_AFTER * STALE_AFTER
        known = self._tokens_known.get(proposer)
        if known is None or self._quiet[proposer] % STALE_AFTER == 0:
            rates, support = self._counts[proposer].rates(self._prior[proposer], TOGETHER, EACH, since)
            hoped = [min(HIGHEST, a + math.sqrt(a * (1 - a) / (n + 1))) for a, n in zip(rates, support, strict=True)]
            known = self._tokens_known[proposer] = expected_tokens(rates), expected_tokens(hoped)
        return known[0][: most + 1], known[1][: most + 1]

    def observe(self, asked: int, draft: Draft, verdict: Verdict, seconds: float) -> None:
        by, chosen = proposer_of(draft), self._chosen.popleft()
        steady = self._undrafted_tokens <= CATCHES_UP
        self._experience.note(asked, draft, verdict, seconds, steady)
        self._undrafted_tokens = 0 if by is Proposer.MODEL else self._undrafted_tokens + len(verdict.token_ids)
        for proposer in Proposer:
            self._quiet[proposer] += 1
        if by is not None:
            self._counts[by].note(len(draft.token_ids), verdict.accepted, self._quiet[by])
            self._quiet[by] = 0
        self._note_mix(asked, by, chosen.model)
        if self._allowance is not None:
            self._allowance += TRIALS_ON * seconds / verdict.rows
            if chosen.trial_rate is not None:
                took = without_queue(seconds, draft, verdict)
                self._allowance -= took - (len(verdict.token_ids) + chosen.company) / chosen.trial_rate

    def _note_mix(self, asked: int, by: Proposer | None, model: int) -> None:
        if asked:
            self._asked = FADING * self._asked + 1
            self._copied = FADING * self._copied + (by is Proposer.NGRAM)
        if asked and by is not Proposer.NGRAM and model:
            self._asked_model = FADING * self._asked_model + 1
            self._empty = FADING * self._empty + (by is None)
