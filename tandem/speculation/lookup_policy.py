"""Decides when a copy from prompt lookup is used instead of the draft model, from how often each was right.

Committed tokens show at every position what a lookup would have copied there and how much of it was right, whether it
was used or not. So copies are scored everywhere, the model only where it drafted. A text that repeats itself often is
copied after short matches, another only after long ones, and a weak model is replaced sooner than a good one.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

from tandem.speculation.acceptance_rates import AcceptanceCounts
from tandem.speculation.common_prefix import common
from tandem.speculation.drafters import NgramDrafter
from tandem.speculation.prediction import PredictionDrafter
from tandem.speculation.round_statistics import FADING_COMPANY
from tandem.speculation.step_times import StepTimes
from tandem.speculation.types import Draft, Proposer

LONGEST = 8
"""Longest match to look for, in tokens. It exceeds LONG so that the best of the long matches is found."""
MODEL = 0
"""The source that is the draft model. The other sources are matches, by length in tokens."""
LONG = 5
"""Matches of this many tokens or more count as one source."""
PRIOR = {MODEL: 0.75, 1: 0.2, 2: 0.4, 3: 0.55, 4: 0.64, LONG: 0.84}
"""Conditional acceptance of each source before anything is measured. On held-out text of the shipped draft, a copied
token is right 64 % of the time after a match of 4 tokens (the model 78 %), 84 % after 5 (74 %) and 94 % after 8 (89 %).
"""
PROCESS_FADING, REQUEST_FADING = 0.998, 0.97
"""Factor by which an observation fades the earlier ones of the process, and of the request."""
PROCESS_TOGETHER, PROCESS_EACH = 4.0, 10.0
REQUEST_TOGETHER, REQUEST_EACH = 3.0, 4.0
"""Weight of the prior in trials: at all positions together, and at each (see AcceptanceCounts.rates)."""
GROWING_SHARE = 0.05
"""The share of a plain step by which a copied token is taken to lengthen it, until that is measured."""
AT_ONCE = 512
"""Tokens of a prompt that are indexed at once: some milliseconds."""
SCORED = 5
"""Tokens of a copy that are scored where the lookup was not used."""
MOST_COPIED = 32
"""Most tokens of a copy whose length is chosen by what steps take."""
ASSUMED = tuple(1 + GROWING_SHARE * drafted for drafted in range(MOST_COPIED + 1))
TRIED_AGAIN = 64
"""Plain steps in a row after which ASSUMED counts until the next copy: a late step may have ended copies by itself."""


class LookupPolicy:
    """Acceptance rates of a draft model and of copies, shared by the requests of a process."""

    def __init__(self) -> None:
        self.counts = {source: AcceptanceCounts(PROCESS_FADING) for source in PRIOR}
        self._steps = StepTimes(GROWING_SHARE)  # of medians: a late step would end copies for the steps after it
        self.times = ASSUMED
        """The times of steps that verify 0 to MOST_COPIED draft tokens, in any unit.

        A new tuple replaces it, so other threads may read it."""
        self.company = 0.0
        """Other rows of a step, taken to commit a token each: a copy makes them wait."""
        self.measured, self._plain = False, 0  # whether any step was recorded; how many plain ones in a row

    def stepped(self, drafted: int, seconds: float, rows: int = 1) -> None:
        """Records that a step of the target took `seconds`: one of its `rows` rows verified `drafted` draft tokens."""
        self.measured, self._plain = True, 0 if drafted else self._plain + 1
        self.company += (1 - FADING_COMPANY) * (rows - 1 - self.company)
        self._steps.note(rows, drafted + 1, seconds)
        known = self._steps.table(1 + round(self.company), MOST_COPIED, 1)
        self.times = known if self._plain < TRIED_AGAIN else ASSUMED

    def rates(self, source: int, most: int) -> list[float]:
        """Returns the conditional acceptance of the first `most` positions of a draft."""
        return self.counts[source].rates([PRIOR[source]] * most, PROCESS_TOGETHER, PROCESS_EACH)[0]


class _Prediction(NamedTuple):
    """The tokens that `source` expects after the first `at` tokens; `last` is the last of those."""

    source: int
    at: int
    last: int
    token_ids: tuple[int, ...]


class PolicedLookup:
    """Prompt lookup next to a draft model, for one request: proposes a copy only if it is expected to beat the model.

    The caller reports what the model drafted (`modelled`) and what was committed (`learn`). `by_time`: the lengths of
    copies may depend on how long steps took; not where tokens depend on lengths. Another thread may ask for copies. A
    `prediction` is looked up in place of the text.
    """

    by_time = True

    def __init__(
        self, policy: LookupPolicy, only_grows: bool = False, prediction: PredictionDrafter | None = None
    ) -> None:
        self._policy, self.stepped = policy, policy.stepped
        self._counts = {source: AcceptanceCounts(REQUEST_FADING) for source in PRIOR}
        self._lookup = prediction or NgramDrafter(LONGEST, only_grows=only_grows)
        self._lock = threading.Lock()
        self._open: list[_Prediction] = []
        self._learned = 0

    async def open(self, prompt: Sequence[int]) -> None:
        await self._lookup.open(prompt)
        for end in range(AT_ONCE, len(prompt), AT_ONCE):  # others of the event loop have their turns between
            self._lookup.note(prompt[:end])
            await asyncio.sleep(0)
        self._open, self._learned = [], len(prompt)

    def copy(self, tokens: Sequence[int], k: int) -> Draft:
        """Returns a copy of at most `k` tokens, or nothing if the model is expected to do better.

        If steps were measured, the copy has the length that commits most tokens per second, and may be empty.
        """
        size, copied = self._match(tokens, k)
        if not copied or self._expected_accepted(min(size, LONG), k) < self._expected_accepted(MODEL, k):
            return Draft()
        if self.by_time and self._policy.measured:
            copied = copied[: self._best_length(size, k)]
        return Draft(copied, proposed_by=(Proposer.NGRAM,) * len(copied))

    def copy_alone(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """Returns the copy of at most `most` tokens by which a step without a draft gains most; empty if by none."""
        size, copied = self._match(tokens, most)
        return copied[: self._best_length(size, most)] if copied else ()

    def _match(self, tokens: Sequence[int], k: int) -> tuple[int, tuple[int, ...]]:
        with self._lock:
            return self._lookup.match(tokens, k)

    def _best_length(self, size: int, most: int) -> int:
        """Returns the length, at most `most`, of a copy after a match of `size` tokens that commits most per second."""
        times, others = self._policy.times, self._policy.company
        best, gain, accepted = 0, (1 + others) / times[0], 0.0
        for length, reached in enumerate(self._reached(min(size, LONG), min(most, MOST_COPIED)), 1):
            accepted += reached
            if (found := (1 + others + accepted) / times[length]) > gain:
                best, gain = length, found
        return best

    async def close(self) -> None:
        await self._lookup.close()

    def modelled(self, tokens: Sequence[int], draft: Sequence[int]) -> None:
        """Records that the model drafted `draft` after `tokens`, some of which may not be committed yet."""
        if draft:
            self._open.append(_Prediction(MODEL, len(tokens), tokens[-1], tuple(draft)))

    def learn(self, tokens: Sequence[int]) -> None:
        """Records that all of `tokens` is committed, and scores the predictions that this settles."""
        with self._lock:
            if not self._lookup.has(tokens):
                self._lookup.note(tokens)
            found = [(at, *self._lookup.match_at(tokens, at, SCORED)) for at in range(self._learned, len(tokens))]
        for at, size, copied in found:
            if copied:
                self._open.append(_Prediction(min(size, LONG), at, tokens[at - 1], copied))
        self._learned = len(tokens)
        self._open = [prediction for prediction in self._open if not self._score(prediction, tokens)]

    def _score(self, prediction: _Prediction, tokens: Sequence[int]) -> bool:
        """Returns whether the prediction is settled: it was scored now, or the tokens that it follows were dropped."""
        if prediction.at > len(tokens):
            return False
        if tokens[prediction.at - 1] != prediction.last:
            return True
        followed = tuple(tokens[prediction.at : prediction.at + len(prediction.token_ids)])
        right = common(prediction.token_ids, followed)
        if right == len(followed) < len(prediction.token_ids):
            return False
        for counts in (self._counts, self._policy.counts):
            counts[prediction.source].note(len(prediction.token_ids), right)
        return True

    def _expected_accepted(self, source: int, k: int) -> float:
        """Returns how many tokens of a draft of `k` are expected to be accepted."""
        return sum(self._reached(source, k))

    def _reached(self, source: int, k: int) -> list[float]:
        """Returns how likely each token of a draft of `k` is accepted, those before it included."""
        own = self._counts[source]
        tried = min(k, 1 + max(len(own.trials), len(self._policy.counts[source].trials)))
        rates = own.rates(self._policy.rates(source, tried), REQUEST_TOGETHER, REQUEST_EACH)[0]
        return list(itertools.accumulate(rates + rates[-1:] * (k - tried), mul))  # untried positions are alike
