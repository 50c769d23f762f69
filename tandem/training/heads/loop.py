"""Runs the steps of a head's training in a seeded order, saved every few minutes and resumed after an interruption."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.runners.eagle.module import EagleHead
from tandem.training.distill import batch_groups
from tandem.training.heads.data import HeadData, Placed
from tandem.training.heads.loss import StepLoss, make_head_batch, step_losses
from tandem.training.heads.settings import HeadTrainConfig
from tandem.training.loop import rate_at


class HeadTraining:
    """Trains `head` for `total` steps. embedding: the target's, which stays as it is; the head is on its device."""

    def __init__(
        self,
        config: HeadTrainConfig,
        head: EagleHead,
        embedding: Tensor,
        data: HeadData,
        total: int,
        show: Callable[[str], None],
    ) -> None:
        self.config, self.head, self.embedding, self.data, self.total, self.show = (
            config, head, embedding, data, total, show)  # fmt: skip
        self.optimizer = torch.optim.AdamW(
            head.parameters(), lr=config.rate, betas=(0.9, 0.95), weight_decay=config.weight_decay
        )
        self.step, self.seconds, self.saved = 0, 0.0, time.monotonic()
        self.device = embedding.device.type
        config.output.mkdir(parents=True, exist_ok=True)
        if config.state.exists():
            self._take_up(torch.load(config.state, weights_only=True, map_location=self.device))

    def _take_up(self, state: dict[str, Any]) -> None:
        if state["total"] != self.total:
            raise ValueError(f"{self.config.state}: of a run of {state['total']} steps, not {self.total}; remove it")
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.show(f"resuming from step {self.step}")

    def save(self) -> None:
        """Writes what a later run resumes from, whole."""
        state = {"head": self.head.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step,
                 "total": self.total, "seconds": self.seconds}  # fmt: skip
        partial = self.config.state.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.config.state)
        self.saved = time.monotonic()

    def run(self) -> float:
        """Trains to the last step; returns the seconds that it took, including runs before an interruption."""
        self.head.train()
        epoch = first = 0
        lengths = [(len(one.sequence.prompt), len(one.sequence.answer)) for one in self.data.train]
        while self.step < self.total:
            groups = batch_groups(lengths, self.config.batch, np.random.default_rng([self.config.seed, epoch]))
            for group in groups[max(0, self.step - first) :]:
                if self.step < self.total:
                    self._one(group)
            first += len(groups)
            epoch += 1
        self.head.eval()
        return self.seconds

    def _one(self, group: list[int]) -> None:
        began = time.monotonic()
        for part in self.optimizer.param_groups:
            part["lr"] = rate_at(self.step, self.total, self.config.warm_up) * self.config.rate
        with working_in(self.device):
            batch = make_head_batch(self.data.with_features([self.data.train[i] for i in group]), self.device)
            losses = step_losses(self.head, self.embedding, batch, self.config.steps, self.config.hard)
        weighted = [self.config.decay**i * one.loss for i, one in enumerate(losses)]
        self.optimizer.zero_grad(set_to_none=True)
        torch.stack(weighted).sum().backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 0.5)
        self.optimizer.step()
        self.step += 1
        self.seconds += time.monotonic() - began
        if self.step % 50 == 0 or self.step == self.total:
            self._show_step(losses)
        if time.monotonic() - self.saved > 60 * self.config.save_minutes:
            self.save()

    def _show_step(self, losses: Sequence[StepLoss]) -> None:
        hits = ", ".join(f"{float(one.hits.float().mean()):.3f}" for one in losses)
        left = self.seconds / self.step * (self.total - self.step) / 60
        self.show(
            f"step {self.step:,} of {self.total:,}: loss {float(losses[0].loss.detach()):.3f}, agreement by step"
            f" {hits}, {left:.0f} min left"
        )


@torch.no_grad()
def acceptance(head: EagleHead, embedding: Tensor, data: HeadData, steps: int, batch: int) -> dict[str, list[float]]:
    """By kind of the held-out sequences, and "all": the share of tokens whose first 1, 2, ... guesses are all right.

    What follows is the target's own text, so the mean number of accepted tokens of a round is close to their sum.
    """
    hits: dict[str, Tensor] = {}
    for group in _groups(data.held_out, batch):
        device = embedding.device.type
        with working_in(device):
            made = make_head_batch(data.with_features(group), device)
            right, of = _right(step_losses(head, embedding, made, steps), len(made.of)), made.of.cpu()
        for kind in {one.sequence.kind for one in group}:
            mine = torch.tensor([group[i].sequence.kind == kind for i in of.tolist()])
            for name in (kind, "all"):
                hits[name] = hits.get(name, torch.zeros(2, steps)) + _counted(right[:, mine], of[mine])
    return {name: [round(float(h / max(1.0, float(n))), 4) for h, n in zip(*one, strict=True)]
            for name, one in sorted(hits.items())}  # fmt: skip


def working_in(device: str) -> AbstractContextManager[object]:
    """Products in bfloat16 on an accelerator; as the weights are on the CPU."""
    return nullcontext() if device == "cpu" else torch.autocast(device, torch.bfloat16)


def _groups(placed: Sequence[Placed], tokens: int) -> list[list[Placed]]:
    most = max(1, tokens // max((one.length for one in placed), default=1))
    return [list(placed[i : i + most]) for i in range(0, len(placed), most)]


def _right(losses: Sequence[StepLoss], count: int) -> Tensor:
    """Whether each step guesses each answered token, bool [steps, answered]."""
    right = torch.zeros(len(losses), count, dtype=torch.bool)
    for step, one in enumerate(losses):
        right[step, one.rows.cpu()] = one.hits.cpu()
    return right


def _counted(right: Tensor, of: Tensor) -> Tensor:
    """Of drafts that begin at each token: how many have the first 1, 2, ... tokens right, and how many there are.

    The s-th token of a draft that begins at answered token i is guessed by step s at token i + s of its sequence.
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
