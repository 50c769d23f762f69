"""Simulates greedy rounds of a head along a text, by module code: what a server of the head would accept.

The drafts of a round follow from the target's hidden states of the known tokens; NxD Inference too feeds accepted
tokens to the head again, with the target's own states. The text is taken as what the target says: exactly so if the
target wrote it greedily.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tandem.training.heads.eagle1.loss import FrozenTarget
from tandem.training.heads.eagle1.module import Eagle1Head


@dataclass(slots=True)
class Rounds:
    """Counts of rounds of up to k draft tokens. drafted, accepted: of draft token 1, 2, ..."""

    k: int
    rounds: int = 0
    tokens: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.drafted, self.accepted = self.drafted or [0] * self.k, self.accepted or [0] * self.k

    def add(self, drafted: int, accepted: int, tokens: int) -> None:
        """Counts a round."""
        self.rounds, self.tokens = self.rounds + 1, self.tokens + tokens
        for i in range(drafted):
            self.drafted[i] += 1
            self.accepted[i] += i < accepted

    def include(self, other: Rounds) -> None:
        """Adds another's counts."""
        self.rounds, self.tokens = self.rounds + other.rounds, self.tokens + other.tokens
        self.drafted = [a + b for a, b in zip(self.drafted, other.drafted, strict=True)]
        self.accepted = [a + b for a, b in zip(self.accepted, other.accepted, strict=True)]

    @property
    def by_position(self) -> list[float]:
        """Of the rounds that had an i-th draft token, the share in which it was accepted."""
        return [round(a / d, 4) if d else 0.0 for a, d in zip(self.accepted, self.drafted, strict=True)]

    @property
    def tokens_per_round(self) -> float:
        """Tokens that a round commits, the target's own included."""
        return round(self.tokens / self.rounds, 4) if self.rounds else 0.0


@torch.no_grad()
def rounds_along(
    head: Eagle1Head, target: FrozenTarget, tokens: Sequence[int], hidden: Tensor, prompt: int, k: int
) -> Rounds:
    """Rounds from the end of the prompt to the end of tokens [n], with the target's hidden states [n, hidden]."""
    found, known = Rounds(k), max(2, prompt)
    while known < len(tokens):
        most = min(k, len(tokens) - known)
        drafts = drafted(head, target, tokens[:known], hidden, most)
        right = [a == b for a, b in zip(drafts, tokens[known:], strict=False)]
        accepted = right.index(False) if False in right else most
        committed = min(accepted + 1, len(tokens) - known)
        found.add(most, accepted, committed)
        known += committed
    return found


@torch.no_grad()
def drafted(head: Eagle1Head, target: FrozenTarget, tokens: Sequence[int], hidden: Tensor, k: int) -> list[int]:
    """k draft tokens after the known `tokens`, greedily. hidden [at least len(tokens) - 1, hidden]."""
    said, states = list(tokens), hidden[: len(tokens) - 1]
    for _ in range(k):
        embeds = target.embedding[torch.tensor(said[1:], device=hidden.device)]
        last = head(embeds[None], states[None])[0, -1:]
        said.append(int((last @ target.output.T).argmax()))
        states = torch.cat((states, last))
    return said[len(tokens) :]
