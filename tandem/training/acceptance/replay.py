"""A drafter against what the target said already.

The target's output does not depend on the draft (design section 3). So its continuation is made once, and any drafter,
at any speculation length, is judged against it: the rounds are those of a deployment, without the target's work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.speculation.acceptance import agree
from tandem.speculation.drafters import Drafter, teach
from tandem.speculation.draws import Drawn
from tandem.speculation.length import FixedLength
from tandem.speculation.loop import DraftThenVerify, speculate
from tandem.speculation.stopping import Stopping, StopRules
from tandem.speculation.types import Draft, SamplingParams, SparseDistribution, SpeculationStats, Verdict


@dataclass(frozen=True, slots=True)
class Continuation:
    """A prompt and what the target said after it, with its own draws under `sampling`."""

    kind: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    sampling: SamplingParams


class KnownTarget:
    """speculation's Verifier over a continuation that is known."""

    def __init__(self, said: Continuation) -> None:
        self._said = said

    async def open(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        """Nothing to prepare."""

    async def verify(
        self, tokens: Sequence[int], draft: Sequence[int], distributions: Sequence[SparseDistribution] = ()
    ) -> Verdict:
        done = len(tokens) - len(self._said.prompt)
        left = self._said.answer[done:]
        return agree(draft[: len(left) - 1], lambda i: Drawn(left[i], 0.0))

    async def close(self) -> None:
        """Nothing to free."""


class Remembered:
    """A model drafter over one continuation that drafts once at each place, as far as anyone will ask.

    A shorter draft is the beginning of a longer one (greedy or seeded draws), so drafters and speculation lengths
    share the work. `asked` counts the rounds that wanted the model.
    """

    def __init__(self, inner: Drafter, said: Continuation, longest: int) -> None:
        self._inner, self._said, self._longest = inner, said, longest
        self._drafts: dict[int, Draft] = {}
        self._opened = False
        self.asked = 0

    async def open(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        if not self._opened:
            await self._inner.open(prompt, sampling)
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
        """Keeps what is remembered; whoever made the inner drafter closes it."""


class _NoText:
    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


async def replay(drafter: Drafter, said: Continuation, k: int) -> SpeculationStats:
    """The rounds of a deployment at speculation length `k`."""
    stats = SpeculationStats()
    stopping = Stopping(StopRules(max_new_tokens=len(said.answer)), _NoText())
    rounds = DraftThenVerify(KnownTarget(said), drafter)
    async for _ in speculate(said.prompt, said.sampling, FixedLength(k), rounds, stopping, stats):
        pass
    return stats


@dataclass(frozen=True, slots=True)
class Agreement:
    """Tokens on which a drafter's next token was the target's, of all tokens; and of those it proposed anything for."""

    agreed: int
    proposed: int
    tokens: int


async def agreement(drafter: Drafter, said: Continuation) -> Agreement:
    """Every token of the continuation in turn, each after the target's own text: one guess a token."""
    agreed = proposed = 0
    await drafter.open(said.prompt, said.sampling)
    try:
        text = list(said.prompt)
        for token in said.answer:
            guess = (await drafter.propose(text, 1)).token_ids
            proposed += bool(guess)
            agreed += guess == (token,)
            text.append(token)
            teach(drafter, text)
    finally:
        await drafter.close()
    return Agreement(agreed, proposed, len(said.answer))
