"""Trains an EAGLE-3 head with the training-time test, and measures it on held-out sequences."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

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
            described = _described(losses)
            self.show(f"step {self.step:,} of {self.total:,}: {described}, {self.minutes_left:.0f} min left")
        if self.due:
            self.save()

    def _losses(self, sequences: Sequence[TrainingSequence]) -> list[StepLoss]:
        with working_in(self.device):
            batch = make_head_batch(sequences, self.target.features(sequences), self.device)
            return step_losses(self.head, self.embedding, batch, self.config.steps, self.config.hard)


def _described(losses: Sequence[StepLoss]) -> str:
    hits = ", ".join(f"{float(one.hits.float().mean()):.3f}" for one in losses)
    return f"loss {float(losses[0].loss.detach()):.3f}, agreement by step {hits}"


@torch.no_grad()
def acceptance(
    head: EagleHead,
    embedding: Tensor,
    data: Sequence[TrainingSequence],
    target: FeatureTarget,
    steps: int,
    batch: int,
) -> dict[str, list[float]]:
    """By kind, and "all": the share of held-out tokens whose first 1, 2, ... guesses are all right.

    Their sum is about the accepted tokens of a round, because the text is the target's own.
    """
    hits: dict[str, Tensor] = {}
    for group in _groups(data, batch):
        device = embedding.device.type
        with working_in(device):
            made = make_head_batch(group, target.features(group), device)
            right, of = _right(step_losses(head, embedding, made, steps), len(made.of)), made.of.cpu()
        for kind in {one.kind for one in group}:
            mine = torch.tensor([group[i].kind == kind for i in of.tolist()])
            for name in (kind, "all"):
                hits[name] = hits.get(name, torch.zeros(2, steps)) + _counted(right[:, mine], of[mine])
    return {name: [round(float(h / max(1.0, float(n))), 4) for h, n in zip(*one, strict=True)]
            for name, one in sorted(hits.items())}  # fmt: skip


def working_in(device: str) -> AbstractContextManager[object]:
    """bfloat16 products on an accelerator; the weights' dtype on the CPU."""
    return nullcontext() if device == "cpu" else torch.autocast(device, torch.bfloat16)


def _groups(data: Sequence[TrainingSequence], tokens: int) -> list[Sequence[TrainingSequence]]:
    most = max(1, tokens // max((len(one.prompt) + len(one.answer) for one in data), default=1))
    return [data[i : i + most] for i in range(0, len(data), most)]


def _right(losses: Sequence[StepLoss], count: int) -> Tensor:
    """Whether each step guesses each answered token, bool [steps, answered]."""
    right = torch.zeros(len(losses), count, dtype=torch.bool)
    for step, one in enumerate(losses):
        right[step, one.rows.cpu()] = one.hits.cpu()
    return right


def _counted(right: Tensor, of: Tensor) -> Tensor:
    """Drafts whose first 1, 2, ... tokens are right, and the drafts.

    Step s guesses the s-th token of a draft that begins at answered token i, at token i + s.
    """
    counted = torch.zeros(2, len(right))
    together = torch.ones(right.shape[1], dtype=torch.bool)
    for step in range(len(right)):
        ahead = torch.zeros_like(together)
        count = max(0, len(of) - step)
        same = of[step:] == of[:count]
        ahead[:count] = right[step, step:] & same
        together = together & ahead
        counted[0, step], counted[1, step] = together.sum(), same.sum()
    return counted
