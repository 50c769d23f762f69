"""Chooses how many draft tokens a round asks for: a fixed number, or the one that commits most tokens per second.

The adaptive policy maximises tokens / seconds, counting all rows that share the steps, over the mix of rounds answered
by copies (free, so longer) and rounds answered by the draft model (a cost per token, so shorter). Given the best rate r
so far, each kind of round takes the length that maximises tokens - r * seconds, and r is the rate that they reach
together. This is Dinkelbach's method for the renewal-reward optimum. Times are arguments; the module reads no clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tandem.speculation.acceptance_rates import HIGHEST, AcceptanceCounts
from tandem.speculation.round_statistics import ANY_ROWS, RoundStatistics, proposer_of, without_queue
from tandem.speculation.types import Draft, Proposer, Verdict

FIRST = 3
"""Draft tokens of the first round of a process."""
TRIED = 8
"""The number of first rounds of a process that try widely different lengths, to measure costs."""
FADING = 0.96
"""Factor by which each round fades a session's earlier acceptance counts, so that about the last 25 rounds count."""
TOGETHER, EACH = 3.0, 3.0
"""Weight of the process's acceptance rates in a session, in trials: at all positions together, and at each."""
STALE_AFTER = 8
"""Rounds without a draft after which the estimate of acceptance is updated for their number."""
TRIALS_AT_FIRST, TRIALS_ON = 0.75, 0.01
"""What trials may cost a session: this many plain rounds at its beginning, then this share of its time. It is divided
among rows that share steps, because a trial by one of them slows all of them."""
TRIED_EVERY = 3
"""Rounds of a session after which a trial is considered: to look for one takes as long as to choose the lengths."""
PLAIN_AFTER = 64
"""Rounds of a process after which a plain round is tried again; otherwise drafting would never be stopped."""
GROWTH, TRIED_FROM = 2, 5
"""A trial is at most so many times as long as what seems best, or of so many tokens: copies of 16 are tried once 8 were
worth it. Without this, up to 16 instead of up to 5 cost 2 % in replays of 34 prompts of 64 tokens."""
LEAST_GAIN = 0.03
"""The tokens that a round with drafts must be expected to gain in a plain one's time: no expectation is quite right."""
LONGEST_OF_MODEL = 8
"""Most tokens of a model's draft, each of which costs time; a copy is free and may be as long as drafts may be."""
CATCHES_UP = 8
"""Tokens without a draft after which the draft model has so much to process that its time is not representative."""


class LengthPlan(NamedTuple):
    """The most draft tokens of a round, copied and of a model, and the expected tokens and seconds of the round.

    If both lengths are 0, nothing is drafted. `company`: tokens that the rows sharing the step commit meanwhile.
    `trial_rate`: the rate of the lengths that seem best, if these are a trial of others. `lasts`: rounds after this one
    may have these lengths too.
    """

    copied: int
    model_k: int
    tokens: float = 1.0
    seconds: float = 0.0
    company: float = 0.0
    trial_rate: float | None = None
    lasts: bool = True

    @property
    def k(self) -> int:
        """The most draft tokens of the round: a copy may be longer than a model's draft."""
        return max(self.copied, self.model_k)

    @property
    def rate(self) -> float:
        """Tokens per second of all rows: a row that drafts makes the others wait."""
        return (self.tokens + self.company) / self.seconds


class LengthPolicy(Protocol):
    """Chooses the draft lengths of one session, and is told the outcome of each round.

    It may have to choose for a round before it is told the outcome of the one under way.
    """

    def choose(self, remaining: int) -> LengthPlan:
        """Returns how many draft tokens to ask for: 0 to `remaining` - 1, given `remaining` >= 1 tokens to produce."""

    def observe(self, requested: int, draft: Draft, verdict: Verdict, seconds: float) -> None:
        """Reports the oldest round not reported yet: the number of draft tokens `requested`, its `seconds` in all."""


@dataclass(frozen=True, slots=True)
class FixedLength:
    """Chooses the same length every round."""

    length: int

    def __post_init__(self) -> None:
        if self.length < 0:
            raise ValueError(f"speculation_length: {self.length} is below 0")

    def choose(self, remaining: int) -> LengthPlan:
        length = min(self.length, remaining - 1)
        return LengthPlan(length, length)

    def observe(self, requested: int, draft: Draft, verdict: Verdict, seconds: float) -> None:
        """Does nothing: the length is fixed."""


class RoundCosts(NamedTuple):
    """Seconds of a verification of n tokens (verify[n]), of a draft of n tokens (draft[n]), and of the rest of a round.

    The verification is the whole step, shared with other rows, which commit `company` tokens in it. Of a shared draft
    step only the row's part counts: its cost is the same for any number of rows, so charged in full it would never pay
    for the first row that drafts. Of the rounds that ask for a draft, copies serve the fraction `copied`, and of the
    others the fraction `empty` gets none.
    """

    verify: Sequence[float]
    draft: Sequence[float]
    undrafted: float
    drafted: float
    copied: float
    empty: float
    company: float = 0.0

    @property
    def plain(self) -> float:
        """Seconds of a round without a draft."""
        return self.verify[1] + self.undrafted

    @property
    def drafting(self) -> list[float]:
        """Seconds of a draft of n tokens and its verification, by n."""
        return [v + d for v, d in zip(self.verify[1:], self.draft, strict=False)]


def expected_by_length(rates: Sequence[float]) -> list[float]:
    """Returns the expected tokens of a round, by draft length from 0: the target's own and the accepted ones."""
    tokens, reached = [1.0], 1.0
    for rate in rates:
        reached *= rate
        tokens.append(tokens[-1] + reached)
    return tokens


def evaluate(
    copied: int, model: int, copies: Sequence[float], models: Sequence[float], costs: RoundCosts
) -> LengthPlan:
    """Evaluates two lengths; a round commits `copies[n]` tokens with a copy of n, `models[n]` with a model's draft."""
    if not copied and not model:
        return LengthPlan(0, 0, 1.0, costs.plain, costs.company)
    c, e = costs.copied, costs.empty if model else 0.0
    seconds_copied = costs.verify[copied + 1]
    seconds_model = (1 - e) * (costs.verify[model + 1] + costs.draft[model]) + e * costs.verify[1]
    tokens = c * copies[copied] + (1 - c) * (e + (1 - e) * models[model])
    seconds = costs.drafted + c * seconds_copied + (1 - c) * seconds_model
    return LengthPlan(copied, model, tokens, seconds, costs.company)


def best_plan(copies: Sequence[float], models: Sequence[float], costs: RoundCosts) -> LengthPlan:
    """Returns the lengths that give the most tokens per second; none if that is hardly more than without drafts."""
    plain = best = evaluate(0, 0, copies, models, costs)
    verify, drafting = costs.verify[1:], costs.drafting
    for _ in range(4):
        copied = _most_gained(copies, verify, best.rate)
        model = _most_gained(models, drafting, best.rate)
        found = evaluate(copied, model, copies, models, costs)
        if found.rate <= best.rate * (1 + 1e-9):
            break
        best = found
    return best if best.rate > plain.rate + LEAST_GAIN / plain.seconds else plain


def _most_gained(tokens: Sequence[float], seconds: Sequence[float], rate: float) -> int:
    gained = [t - rate * s for t, s in zip(tokens, seconds, strict=False)]
    return gained.index(max(gained))


def _grown(tokens: Sequence[float], length: int) -> Sequence[float]:
    """Returns the expected tokens of the lengths that may be tried where `length` seems best."""
    return tokens[: max(TRIED_FROM, GROWTH * length) + 1]


class AdaptiveLength:
    """Chooses lengths of at most `most` for one session; sessions share measurements through `statistics`.

    If nothing is drafted because it does not pay, the evidence fades, so that after a while drafting may pay again.
    Trials are paid from a small share of the session's time: a failed trial is charged to it, a successful one pays for
    itself. So trials become rare where they fail and frequent where they succeed.
    """

    def __init__(self, most: int, statistics: RoundStatistics) -> None:
        self._most, self._statistics = most, statistics
        self._prior = {proposer: statistics.rates(proposer, most) for proposer in Proposer}
        self._counts = {proposer: AcceptanceCounts(FADING) for proposer in Proposer}
        self._idle = dict.fromkeys(Proposer, 0)  # rounds since the proposer's last draft
        self._asked, self._copied = 5.0, 5.0 * statistics.copied
        self._asked_model, self._empty = 1.0, 0.0
        self._undrafted_tokens = 0
        self._tokens_known: dict[Proposer, tuple[list[float], list[float]]] = {}
        self._planned = 0
        self._allowance: float | None = None
        self._chosen: deque[LengthPlan] = deque()

    def choose(self, remaining: int) -> LengthPlan:
        most = min(self._most, remaining - 1)
        plan = self._plan(most) if most > 0 else LengthPlan(0, 0)
        self._chosen.append(plan)
        return plan

    def _plan(self, most: int) -> LengthPlan:
        if self._statistics.rounds < TRIED or not self._statistics.verify.steps:
            first = min(most, (FIRST, 0, min(LONGEST_OF_MODEL, self._most), 1)[self._statistics.rounds % 4])
            return LengthPlan(first, first, lasts=False)
        costs = self._costs(most)
        if self._allowance is None:
            self._allowance = TRIALS_AT_FIRST * costs.plain / (1 + self._statistics.neighbours)
        copies, hoped_copies = self._tokens(Proposer.NGRAM, most)
        models, hoped_models = self._tokens(Proposer.MODEL, most)
        plan = best_plan(copies, models, costs)
        self._planned += 1
        if self._planned % TRIED_EVERY:
            return plan
        hoped = best_plan(_grown(hoped_copies, plan.copied), _grown(hoped_models, plan.model_k), costs)
        trials = [hoped] if hoped.copied > plan.copied or hoped.model_k > plan.model_k else []
        if plan.k and self._statistics.rounds_since_plain >= PLAIN_AFTER:
            trials.append(LengthPlan(0, 0))
        for copied, model, *_ in trials:
            trial = evaluate(copied, model, copies, models, costs)
            if trial.seconds - (trial.tokens + trial.company) / plan.rate <= self._allowance:
                return trial._replace(trial_rate=plan.rate, lasts=False)
        return plan

    def _costs(self, most: int) -> RoundCosts:
        known = self._statistics
        undrafted, drafted = known.overhead_seconds
        rows = 1 + round(known.neighbours)
        draft = known.draft.table(rows, self._most) if known.draft.steps else (0.0,) * (self._most + 1)
        verify = known.verify.table(ANY_ROWS, self._most + 1, round(known.other_tokens))
        company = known.neighbours * known.committed
        others = known.drafting * (rows - 1) / rows
        shares = (0.0, *(seconds / rows for seconds in draft[1:]))
        mix = self._copied / self._asked, self._empty / self._asked_model
        return RoundCosts(verify, shares, undrafted + others, drafted + others, *mix, company)

    def _tokens(self, proposer: Proposer, most: int) -> tuple[list[float], list[float]]:
        """Returns expected tokens by draft length, from the estimated rates and from optimistic ones."""
        since = self._idle[proposer] // STALE_AFTER * STALE_AFTER
        known = self._tokens_known.get(proposer)
        if known is None or self._idle[proposer] % STALE_AFTER == 0:
            rates, support = self._counts[proposer].rates(self._prior[proposer], TOGETHER, EACH, since)
            hoped = [min(HIGHEST, a + math.sqrt(a * (1 - a) / (n + 1))) for a, n in zip(rates, support, strict=True)]
            known = self._tokens_known[proposer] = expected_by_length(rates), expected_by_length(hoped)
        longest = most if proposer is Proposer.NGRAM else min(LONGEST_OF_MODEL, most)
        return known[0][: longest + 1], known[1][: longest + 1]

    def observe(self, requested: int, draft: Draft, verdict: Verdict, seconds: float) -> None:
        by, chosen = proposer_of(draft), self._chosen.popleft()
        if draft.ahead:
            return  # such a round's time says nothing about one that waits for its draft
        steady = self._undrafted_tokens <= CATCHES_UP
        self._statistics.note(requested, draft, verdict, seconds, steady)
        self._undrafted_tokens = 0 if by is Proposer.MODEL else self._undrafted_tokens + len(verdict.token_ids)
        for proposer in Proposer:
            self._idle[proposer] += 1
        if by is not None:
            self._counts[by].note(len(draft.token_ids), verdict.accepted, self._idle[by])
            self._idle[by] = 0
        self._note_mix(requested, by, chosen.model_k)
        if self._allowance is not None:
            self._allowance += TRIALS_ON * seconds / verdict.rows
            if chosen.trial_rate is not None:
                took = without_queue(seconds, draft, verdict)
                self._allowance -= took - (len(verdict.token_ids) + chosen.company) / chosen.trial_rate

    def _note_mix(self, requested: int, by: Proposer | None, model: int) -> None:
        if requested:
            self._asked = FADING * self._asked + 1
            self._copied = FADING * self._copied + (by is Proposer.NGRAM)
        if requested and by is not Proposer.NGRAM and model:
            self._asked_model = FADING * self._asked_model + 1
            self._empty = FADING * self._empty + (by is None)
