"""Counts a drafter's rounds on an answer that the target generated before.

The target's output does not depend on the draft: one answer and one draft at each of its positions give the rounds of a
deployment at every speculation length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.speculation.drafters import Drafter
from tandem.speculation.types import Draft, Proposer, common
from tandem_train.step_costs import PairCosts


@dataclass(frozen=True, slots=True)
class Continuation:
    """A prompt and the target's answer."""

    kind: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    def texts(self) -> list[tuple[int, ...]]:
        """The tokens before each of the answer's."""
        return [self.prompt + self.answer[:at] for at in range(len(self.answer))]


@dataclass(slots=True)
class RoundFigures:
    """Rounds of a drafter at one speculation length, over all prompts.

    `by_position`: rounds that accepted draft token i. `asked`: rounds in which the model drafted.
    """

    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    by_position: list[int] = field(default_factory=list)
    asked: int = 0

    def add(self, answer: Sequence[int], drafts: Sequence[Draft], k: int) -> None:
        """Adds a deployment's rounds of `k`; `drafts`: of each position."""
        self.by_position += [0] * (k - len(self.by_position))
        at = 0
        while at < len(answer):
            draft = drafts[at].token_ids[: min(k, len(answer) - at - 1)]
            right = common(draft, answer[at:])
            self.rounds, self.tokens = self.rounds + 1, self.tokens + right + 1
            self.drafted, self.accepted = self.drafted + len(draft), self.accepted + right
            self.asked += Proposer.MODEL in drafts[at].proposed_by[: len(draft)]
            for position in range(right):
                self.by_position[position] += 1
            at += right + 1

    @property
    def tokens_per_round(self) -> float:
        """Mean, with the target's own token; 0 without rounds."""
        return self.tokens / self.rounds if self.rounds else 0.0

    def speedup(self, costs: PairCosts, k: int) -> float:
        """Predicted over plain decoding from step costs alone; 1 if steps took no time."""
        step = costs.verify[k] + (costs.propose[k] * self.asked / self.rounds if self.asked else 0.0)
        return self.tokens_per_round * costs.verify[0] / step if step else 1.0


@dataclass(slots=True)
class Agreement:
    """Tokens, and those whose draft begins with the right one."""

    agreed: int = 0
    tokens: int = 0

    def add(self, answer: Sequence[int], drafts: Sequence[Draft]) -> None:
        self.tokens += len(answer)
        self.agreed += sum(draft.token_ids[:1] == (token,) for draft, token in zip(drafts, answer, strict=True))


async def drafts_of(drafter: Drafter, continuation: Continuation, k: int) -> list[Draft]:
    """Drafts `k` tokens before each token of the answer."""
    await drafter.open(continuation.prompt)
    try:
        return [await drafter.propose(text, k) for text in continuation.texts()]
    finally:
        await drafter.close()
