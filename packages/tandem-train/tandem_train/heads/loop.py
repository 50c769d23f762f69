"""Trains an EAGLE-3 head with the training-time test."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.checkpoints.head_config import default_layers
from tandem.runners.eagle.module import EagleHead
from tandem_train.loop import Resumable, TrainingData
from tandem_train.settings import HeadTrainConfig
from tandem_train.shards import TrainingSequence


@dataclass(frozen=True, slots=True)
class HeadBatch:
    """Padded sequences: tokens [b, n], features [b, n, 3 * hidden].

    Answered tokens: predicted by row `at` of sequence `of`; the target's best ids and probabilities [answered, top].
    """

    tokens: Tensor
    features: Tensor
    of: Tensor
    at: Tensor
    ids: Tensor
    probabilities: Tensor


def make_head_batch(
    sequences: Sequence[TrainingSequence], features: Sequence[Tensor], device: str = "cpu"
) -> HeadBatch:
    """Stacks sequences with their features [tokens, 3 * hidden]."""
    longest = max(map(len, features))
    tokens = torch.zeros(len(sequences), longest, dtype=torch.int64)
    stacked = torch.zeros(len(sequences), longest, features[0].shape[1], device=device)
    of: list[int] = []
    at: list[int] = []
    keep: list[int] = []
    for number, (one, read) in enumerate(zip(sequences, features, strict=True)):
        own = np.concatenate((one.prompt, one.answer)).astype(np.int64)
        tokens[number, : len(own)] = torch.from_numpy(own)
        stacked[number, : len(own)] = read.float()
        rows = len(one.prompt) - 2 + np.arange(len(one.answer))
        of += [number] * int((rows >= 0).sum())
        at += rows[rows >= 0].tolist()
        keep += (rows >= 0).tolist()
    kept = np.array(keep)
    ids = np.concatenate([one.ids for one in sequences])[kept].astype(np.int64)
    logprobs = np.concatenate([one.logprobs for one in sequences])[kept].astype(np.float32)
    probabilities = torch.softmax(torch.from_numpy(logprobs), -1)
    rows_of, rows_at, best = torch.tensor(of), torch.tensor(at), torch.from_numpy(ids)
    return HeadBatch(
        tokens.to(device), stacked, rows_of.to(device), rows_at.to(device), best.to(device), probabilities.to(device)
    )


def head_states(head: EagleHead, embedding: Tensor, batch: HeadBatch, steps: int) -> list[Tensor]:
    """The head's hidden states by step, [b, n - 1, hidden]; step s is valid from row s on."""
    embeds = embedding[batch.tokens[:, 1:]].to(head.fc.weight.dtype)
    count = embeds.shape[1]
    positions = torch.arange(count, device=embeds.device)[None].expand(len(embeds), -1)
    hidden = head.fuse(batch.features[:, :-1].to(head.fc.weight.dtype))
    keys: list[Tensor] = []
    values: list[Tensor] = []
    states: list[Tensor] = []
    for step in range(steps):
        residual, q, k, v = head.project(embeds, hidden, positions)
        groups = q.shape[1] // k.shape[1]
        keys.append(k.repeat_interleave(groups, 1))
        values.append(v.repeat_interleave(groups, 1))
        state = head.finish(residual, _attended(q, keys, values, step))
        states.append(state)
        hidden = torch.roll(state, 1, 1)
    return states


def _attended(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], step: int) -> Tensor:
    """Attends to keys of step 0 up to row r - step, and of step i at row r - step + i; [b, heads, rows, d]."""
    scale, rows = 1 / math.sqrt(q.shape[-1]), torch.arange(q.shape[2], device=q.device)
    seen = rows[None, :] <= rows[:, None] - step
    scores = q @ keys[0].transpose(-1, -2) * scale
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    own = [(q * torch.roll(keys[i], step - i, 2)).sum(-1, keepdim=True) * scale for i in range(1, step + 1)]
    weights = torch.softmax(torch.cat([scores, *own], -1), -1)
    out = weights[..., : len(rows)] @ values[0]
    for i in range(1, step + 1):
        out = out + weights[..., len(rows) + i - 1, None] * torch.roll(values[i], step - i, 2)
    return out


@dataclass(frozen=True, slots=True)
class StepLoss:
    """loss: mean cross-entropy. hits: answered tokens with the target's best token in the best column."""

    loss: Tensor
    hits: Tensor


def step_losses(head: EagleHead, embedding: Tensor, batch: HeadBatch, steps: int, hard: float = 0.0) -> list[StepLoss]:
    """Each step's loss against the target's distribution over the head's tokens.

    hard: weight of the target's best token. A best token that the head lacks is missed, not learnt.
    """
    columns = torch.full((len(head.t2d),), -1, device=batch.ids.device)
    columns[head.token_ids] = torch.arange(len(head.token_ids), device=columns.device)
    wanted = columns[batch.ids]
    weights = torch.where(wanted >= 0, batch.probabilities, 0)
    weights = (1 - hard) * weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)
    weights[:, 0] += hard
    learnt = wanted[:, 0] >= 0
    losses = []
    for step, state in enumerate(head_states(head, embedding, batch, steps)):
        rows = (batch.at >= step).nonzero()[:, 0]
        logprobs = head.logits(state[batch.of[rows], batch.at[rows]]).float().log_softmax(-1)
        entropy = -(weights[rows] * logprobs.gather(-1, wanted[rows].clamp(min=0))).sum(-1)
        mask = learnt[rows]
        loss = (entropy * mask).sum() / mask.sum().clamp(min=1)
        losses.append(StepLoss(loss, (logprobs.argmax(-1) == wanted[rows, 0]) & mask))
    return losses


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
        losses = self._losses([self.data.train[i] for i in group])
        loss = torch.stack([self.config.decay**i * one.loss for i, one in enumerate(losses)]).sum()
        hits = ", ".join(f"{float(one.hits.float().mean()):.3f}" for one in losses)
        self.take_step(loss, began, 0.5, f"loss {float(losses[0].loss.detach()):.3f}, agreement by step {hits}")

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
