"""Trains an EAGLE-1 head, and measures it in rounds along held-out sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from tandem.training.heads.data import HeadData, Placed
from tandem.training.heads.eagle1.loss import FrozenTarget, eagle1_loss, make_eagle1_batch
from tandem.training.heads.eagle1.module import Eagle1Head
from tandem.training.heads.eagle1.rounds import Rounds, rounds_along
from tandem.training.heads.eagle1.settings import Eagle1TrainConfig
from tandem.training.heads.resumable import ResumableTraining
from tandem.training.shards import TrainingSequence

ROUNDS_OF = 4  # draft tokens of the rounds that held-out sequences are measured in
SEQUENCES = 64  # held-out sequences that are measured, at most


class Eagle1Training(ResumableTraining):
    """Trains an EAGLE-1 head."""

    def __init__(
        self,
        config: Eagle1TrainConfig,
        head: Eagle1Head,
        target: FrozenTarget,
        data: HeadData,
        total: int,
        show: Callable[[str], None],
    ) -> None:
        super().__init__(config, head, data, total, show, weight_decay=0.0)
        self.config, self.head, self.target = config, head, target

    def loss_of(self, placed: list[Placed]) -> tuple[Tensor, Callable[[], str]]:
        batch = make_eagle1_batch(with_hidden(self.data, placed, self.target))
        lost = eagle1_loss(self.head, self.target, batch, self._noise(batch.hidden))
        loss = self.config.regression * lost.regression + self.config.classification * lost.classification
        return (
            loss,
            lambda: (
                f"regression {float(lost.regression.detach()):.4f}, cross-entropy"
                f" {float(lost.classification.detach()):.3f}, agreement {float(lost.hits.float().mean()):.3f}"
            ),
        )

    def _noise(self, like: Tensor) -> Tensor:
        """Uniform noise, that of this step in every run."""
        chance = torch.Generator().manual_seed(self.config.seed * 1_000_003 + self.step)
        drawn = torch.rand(like.shape, generator=chance) - 0.5
        return drawn.to(like.device) * self.config.noise


def with_hidden(
    data: HeadData, placed: Sequence[Placed], target: FrozenTarget
) -> list[tuple[TrainingSequence, Tensor]]:
    """The sequences with the target's hidden states after its last norm, [tokens, hidden]."""
    return [(sequence, target.hidden(features)) for sequence, features in data.with_features(placed)]


def held_out_rounds(head: Eagle1Head, target: FrozenTarget, data: HeadData) -> dict[str, dict[str, object]]:
    """Rounds along held-out sequences, by kind and together; an estimate where a text was not drawn greedily."""
    found: dict[str, Rounds] = {}
    for one, hidden in with_hidden(data, data.held_out[:SEQUENCES], target):
        tokens = np.concatenate((one.prompt, one.answer)).tolist()
        rounds = rounds_along(head, target, tokens, hidden, len(one.prompt), ROUNDS_OF)
        for name in (one.kind, "all"):
            found.setdefault(name, Rounds(ROUNDS_OF)).include(rounds)
    return {
        name: {"by_position": one.by_position, "tokens_per_round": one.tokens_per_round}
        for name, one in sorted(found.items())
    }
