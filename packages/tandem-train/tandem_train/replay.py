"""Replays drafters against a continuation that the target generated before.

The target's output does not depend on the draft: one continuation serves every drafter and speculation length, with a
deployment's rounds and without the target's work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.speculation.drafters import Drafter
from tandem.speculation.draws import Drawn
from tandem.speculation.length import FixedLength
from tandem.speculation.loop import speculate
from tandem.speculation.rounds import DraftedRounds, VerifierHere
from tandem.speculation.rules import agree
from tandem.speculation.stopping import NoText, Stopping, StopRules
from tandem.speculation.types import Draft, SamplingParams, SparseDistribution, SpeculationStats, Verdict


@dataclass(frozen=True, slots=True)
class Continuation:
    """A prompt and the target's answer under `sampling`."""

    kind: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    sampling: SamplingParams


class RecordedTarget(VerifierHere):
    """A known continuation instead of a model."""

    def __init__(self, continuation: Continuation) -> None:
        self._continuation = continuation

    async def open(self, prompt: Sequence[int]) -> None:
        """Does nothing."""

    async def verify(
        self, tokens: Sequence[int], draft: Sequence[int], distributions: Sequence[SparseDistribution] = ()
    ) -> Verdict:
        done = len(tokens) - len(self._continuation.prompt)
        left = self._continuation.answer[done:]
        return agree(draft[: len(left) - 1], lambda i: Drawn(left[i], 0.0))

    async def close(self) -> None:
        """Does nothing."""


class MemoizedDrafter:
    """A model drafter for one continuation that drafts once at each position, at the longest length.

    Shorter drafts are prefixes (greedy or seeded draws). `asked` counts the rounds that used the model.
    """

    def __init__(self, inner: Drafter, continuation: Continuation, longest: int) -> None:
        self._inner, self._continuation, self._longest = inner, continuation, longest
        self._drafts: dict[int, Draft] = {}
        self._opened = False
        self.asked = 0

    async def open(self, prompt: Sequence[int]) -> None:
        if not self._opened:
            await self._inner.open(prompt)
            self._opened = True

    async def propose(self, tokens: Sequence[int], k: int, model_k: int | None = None) -> Draft:
        self.asked += 1
        if len(tokens) not in self._drafts:
            self._drafts[len(tokens)] = await self._inner.propose(tokens, self._longest)
        draft = self._drafts[len(tokens)]
        return Draft(draft.token_ids[:k], proposed_by=draft.proposed_by[:k])

    async def draft_bonus(self, tokens: Sequence[int]) -> Draft:
        return await self.propose(tokens, 1)

    async def close(self) -> None:
        """Keeps the drafts; the inner drafter's creator closes it."""


async def replay(drafter: Drafter, continuation: Continuation, k: int) -> SpeculationStats:
    """A deployment's rounds at speculation length `k`."""
    stats = SpeculationStats()
    stopping = Stopping(StopRules(max_new_tokens=len(continuation.answer)), NoText())
    rounds = DraftedRounds(RecordedTarget(continuation), drafter)
    async for _ in speculate(continuation.prompt, FixedLength(k), rounds, stopping, stats):
        pass
    return stats


@dataclass(frozen=True, slots=True)
class Agreement:
    """Tokens in all, tokens with a proposal, and tokens with the right one."""

    agreed: int = 0
    proposed: int = 0
    tokens: int = 0

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(self.agreed + other.agreed, self.proposed + other.proposed, self.tokens + other.tokens)


async def agreement(drafter: Drafter, continuation: Continuation) -> Agreement:
    """Compares the drafter's next token with the target's at every position."""
    agreed = proposed = 0
    await drafter.open(continuation.prompt)
    try:
        text = list(continuation.prompt)
        for token in continuation.answer:
            draft = (await drafter.propose(text, 1)).token_ids
            proposed += bool(draft)
            agreed += draft == (token,)
            text.append(token)
    finally:
        await drafter.close()
    return Agreement(agreed, proposed, len(continuation.answer))
