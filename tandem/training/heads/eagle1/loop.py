"""Runs the steps of an EAGLE-1 head's training in a seeded order, saved and resumed as those of other heads are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.training.distill import batch_groups
from tandem.training.heads.data import HeadData, Placed
from tandem.training.heads.eagle1.loss import FrozenTarget, eagle1_loss, make_eagle1_batch
from tandem.training.heads.eagle1.module import Eagle1Head
from tandem.training.heads.eagle1.rounds import Rounds, rounds_along
from tandem.training.heads.eagle1.settings import Eagle1TrainConfig
from tandem.training.loop import rate_at
from tandem.training.shards import TrainingSequence

ROUNDS_OF = 4  # draft tokens of the rounds that held-out sequences are measured in
SEQUENCES = 64  # held-out sequences that are measured, at most


class Eagle1Training:
    """Trains `head` for `total` steps."""

    def __init__(
        self,
        config: Eagle1TrainConfig,
        head: Eagle1Head,
        target: FrozenTarget,
        data: HeadData,
        total: int,
        show: Callable[[str], None],
    ) -> None:
        self.config, self.head, self.target, self.data = config, head, target, data
        self.total, self.show = total, show
        self.optimizer = torch.optim.AdamW(head.parameters(), lr=config.rate, betas=(0.9, 0.95), weight_decay=0.0)
        self.step, self.seconds, self.saved = 0, 0.0, time.monotonic()
        config.output.mkdir(parents=True, exist_ok=True)
        if config.state.exists():
            self._take_up(torch.load(config.state, weights_only=True))

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
        batch = make_eagle1_batch(with_hidden(self.data, [self.data.train[i] for i in group], self.target))
        lost = eagle1_loss(self.head, self.target, batch, self._noise(batch.hidden))
        self.optimizer.zero_grad(set_to_none=True)
        (self.config.regression * lost.regression + self.config.classification * lost.classification).backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 0.5)
        self.optimizer.step()
        self.step += 1
        self.seconds += time.monotonic() - began
        if self.step % 50 == 0 or self.step == self.total:
            left = self.seconds / self.step * (self.total - self.step) / 60
            self.show(
                f"step {self.step:,} of {self.total:,}: regression {float(lost.regression.detach()):.4f}, cross-entropy"
                f" {float(lost.classification.detach()):.3f}, agreement {float(lost.hits.float().mean()):.3f},"
                f" {left:.0f} min left"
            )
        if time.monotonic() - self.saved > 60 * self.config.save_minutes:
            self.save()

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
