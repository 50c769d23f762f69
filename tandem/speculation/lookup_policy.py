"""Chooses which copies of prompt lookup are drafts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from tandem.speculation.drafters import Drafter, NgramDrafter, PredictionDrafter
from tandem.speculation.estimate import (
    PRIOR_COPIES,
    REQUEST_FADING,
    AcceptanceRates,
    Estimate,
    best_length,
    expected_by_length,
)
from tandem.speculation.types import Draft, LengthPlan, Proposer, Verdict, common

LONGEST = 8  # tokens of a match
LEAST = 3  # shortest match that replaces a model's draft; learning it gained < 2 % in replays
AT_ONCE = 512  # prompt tokens indexed in one go: some milliseconds
TRIED, TRIED_AGAIN = 2, 64  # tokens copied on trial after TRIED_AGAIN plain steps: late steps may have ended copies
MOST_COPIED = 32  # tokens, unless a step may be wider


class PolicedLookup:
    """Prompt lookup, or by a `prediction`. `copy` serves with a draft model, `copy_alone` where nothing else drafts."""

    def __init__(
        self, estimate: Estimate, only_grows: bool = False, prediction: PredictionDrafter | None = None
    ) -> None:
        self._estimate = estimate
        self._acceptance = {size: AcceptanceRates(known, REQUEST_FADING) for size, known in estimate.copies.items()}
        self._lookup = prediction or NgramDrafter(LONGEST, only_grows=only_grows)
        self._lock = threading.Lock()
        self._expected: tuple[int, ...] = ()  # after `_matched` tokens, of which `_size` matched
        self._matched = self._size = self._plain = 0

    async def open(self, prompt: Sequence[int]) -> None:
        await self._lookup.open(prompt)
        for end in range(AT_ONCE, len(prompt), AT_ONCE):  # others of the event loop have their turns between
            self._lookup.note(prompt[:end])
            await asyncio.sleep(0)
        self._expected = ()

    def copy(self, tokens: Sequence[int], k: int) -> Draft:
        """Copies at most `k` tokens; none after a short match."""
        size, copied = self._match(tokens, k)
        copied = copied if size >= LEAST else ()
        return Draft(copied, proposed_by=(Proposer.NGRAM,) * len(copied))

    def copy_alone(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """Returns the copy of at most `most` tokens that gains most; empty if none does."""
        new = tokens[self._matched : self._matched + len(self._expected)]
        if new:
            right = common(new, self._expected)
            for known in (self._acceptance, self._estimate.copies):
                known[self._size].note(len(new), right)
        size, self._expected = self._match(tokens, max(MOST_COPIED, most))
        self._matched, self._size = len(tokens), min(size, max(PRIOR_COPIES))
        copied = self._expected[:most]
        if not copied or not self._estimate.target.known:
            return copied
        expected = expected_by_length(self._acceptance[self._size].rates(len(copied)))
        length = best_length(expected, self._estimate.steps(len(copied)), self._estimate.rows, 1.0)
        if not length and self._plain >= TRIED_AGAIN:
            length = TRIED
        self._plain = 0 if length else self._plain + 1
        return copied[:length]

    def _match(self, tokens: Sequence[int], k: int) -> tuple[int, tuple[int, ...]]:
        with self._lock:
            return self._lookup.match(tokens, k)

    async def close(self) -> None:
        await self._lookup.close()

    def stepped(self, drafted: int, seconds: float, rows: int = 1) -> None:
        step = Verdict((), 0, 0.0, seconds, rows=rows, step_tokens=drafted + rows)
        self._estimate.stepped(drafted + 1, step, self._estimate.target)


class HybridDrafter:
    """Copies where lookup finds a match, at no draft step; else the model drafts."""

    def __init__(self, lookup: PolicedLookup, model: Drafter) -> None:
        self._lookup, self._model = lookup, model

    async def open(self, prompt: Sequence[int]) -> None:
        await self._lookup.open(prompt)
        await self._model.open(prompt)

    async def propose(self, tokens: Sequence[int], plan: LengthPlan) -> Draft:
        copied = self._lookup.copy(tokens, plan.k)
        return copied if copied.token_ids or not plan.model_k else await self._model.propose(tokens, plan)

    async def draft_bonus(self, tokens: Sequence[int]) -> Draft:
        copied = self._lookup.copy(tokens, 1)
        return copied if copied.token_ids else await self._model.draft_bonus(tokens)

    async def close(self) -> None:
        await self._lookup.close()
        await self._model.close()
