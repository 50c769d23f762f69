"""Trains an EAGLE-3 head with the training-time test."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.checkpoints.head_config import default_layers
from tandem.runners.eagle.module import EagleHead
from tandem_train.heads.loss import StepLoss, make_head_batch, step_losses
from tandem_train.loop import Resumable, TrainingData
from tandem_train.settings import HeadTrainConfig
from tandem_train.shards import TrainingSequence


class FeatureTarget:
    """The target in transformers, with taps after three layers.

    batch: about the tokens of a step. Raises ValueError.
    """

    def __init__(self, source: dict[str, object], layers: Sequence[int] | None, device: str, batch: int) -> None:
        from transformers import AutoModelForCausalLM

        from tandem.runners.eagle.hidden_states import decoder_layers, tap
        from tandem.runners.loading import choose_dtype, transformers_logging
        from tandem.runners.torch.platforms import choose_platform

        transformers_logging()
        self.device = choose_platform(device).name
        module: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=choose_dtype("auto", self.device))
        self._module = module.to(self.device).eval().requires_grad_(False)
        count = len(decoder_layers(module))
        self.layers = tuple(layers or default_layers(count))
        if len(self.layers) != 3 or not all(1 <= layer <= count for layer in self.layers):
            raise ValueError(f"layers: {list(self.layers)} are not three of the target's {count}, counted from 1")
        tap(module, self.layers)
        self._batch = batch

    @torch.inference_mode()
    def features(self, data: Sequence[TrainingSequence]) -> list[Tensor]:
        """Features [tokens, 3 * hidden] of each sequence, on the target's device, in its dtype."""
        from transformers import DynamicCache

        sequences = [np.concatenate((one.prompt, one.answer)) for one in data]
        made: list[Tensor] = [torch.empty(0)] * len(sequences)
        order = sorted(range(len(sequences)), key=lambda i: (len(sequences[i]), i))
        while order:
            longest = len(sequences[order[-1]])
            group = [order.pop() for _ in range(min(len(order), max(1, self._batch // longest)))]
            padded = torch.zeros(len(group), longest, dtype=torch.int64)
            for row, i in enumerate(group):  # padding stands behind, where no token sees it
                padded[row, : len(sequences[i])] = torch.from_numpy(sequences[i].astype(np.int64))
            cache: Any = DynamicCache()
            cache.caught = {}
            self._module.base_model(input_ids=padded.to(self.device), past_key_values=cache)
            caught = torch.cat([cache.caught[layer] for layer in self.layers], dim=-1)
            for row, i in enumerate(group):
                made[i] = caught[row, : len(sequences[i])].clone()
        return made


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
