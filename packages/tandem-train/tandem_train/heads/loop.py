"""Trains an EAGLE-3 head with the training-time test."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tandem.runners.eagle.module import EagleHead
from tandem_train.heads.features import FeatureTarget
from tandem_train.heads.loss import StepLoss, make_head_batch, step_losses
from tandem_train.heads.settings import HeadTrainConfig
from tandem_train.loop import Resumable, TrainingData
from tandem_train.shards import TrainingSequence


class HeadTraining(Resumable):
    """embedding: the target's, frozen, on the head's device."""

    def __init__(
        self,
        config: HeadTrainConfig,
        head: EagleHead,
        embedding: Tensor,
        data: TrainingData,
        target: FeatureTarget,
        total: int,
        show: Callable[[str], None],
    ) -> None:
        self.config, self.head, self.embedding, self.data, self.target = config, head, embedding, data, target
        optimizer = torch.optim.AdamW(
            head.parameters(), lr=config.rate, betas=(0.9, 0.95), weight_decay=config.weight_decay
        )
        super().__init__(config, head, optimizer, total, show)

    def run(self) -> float:
        """Trains to the last step; returns the seconds, earlier runs included."""
        self.head.train()
        for group in self.groups(self.data.train):
            self.train_group(group)
        self.head.eval()
        return self.seconds

    def train_group(self, group: list[int]) -> None:
        """One step on a batch."""
        began = time.monotonic()
        self.set_rate()
        losses = self._losses([self.data.train[i] for i in group])
        loss = torch.stack([self.config.decay**i * one.loss for i, one in enumerate(losses)]).sum()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 0.5)
        self.optimizer.step()
        self.count(began)
        if self.step % 50 == 0 or self.step == self.total:
            hits = ", ".join(f"{float(one.hits.float().mean()):.3f}" for one in losses)
            self.show(
                f"step {self.step:,} of {self.total:,}: loss {float(losses[0].loss.detach()):.3f}, agreement by step"
                f" {hits}, {self.minutes_left:.0f} min left"
            )
        if self.due:
            self.save()

    def _losses(self, sequences: Sequence[TrainingSequence]) -> list[StepLoss]:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device != "cpu"):
            batch = make_head_batch(sequences, self.target.features(sequences), self.device)
            return step_losses(self.head, self.embedding, batch, self.config.steps, self.config.hard)

    @torch.no_grad()
    def held_out_agreement(self) -> list[float]:
        """By step: the share of held-out tokens that the head guesses."""
        data, steps = self.data.held_out, self.config.steps
        most = max(1, self.config.batch // max(len(one.prompt) + len(one.answer) for one in data))
        counts = torch.zeros(2, steps)
        for at in range(0, len(data), most):
            for step, one in enumerate(self._losses(data[at : at + most])):
                counts[:, step] += torch.tensor([float(one.hits.sum()), len(one.hits)])
        return [round(float(hits / max(1.0, float(count))), 4) for hits, count in counts.T]
