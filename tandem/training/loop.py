"""Runs the training loop: steps in a seeded order, saved every few minutes and resumed after an interruption."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tandem.training.distill import Softmax, agreement, batch_groups, copies, loss_of, make_batch
from tandem.training.settings import TrainConfig
from tandem.training.shards import TrainingSequence


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The training sequences. counts [vocabulary]: how often each token was among the target's four best."""

    train: list[TrainingSequence]
    held_out: list[TrainingSequence]
    tokens: int
    counts: torch.Tensor


def rate_at(step: int, steps: int, warm_up: int) -> float:
    """Returns the learning rate of a step: linear warm-up, then a cosine decay to a fiftieth."""
    if step < warm_up:
        return (step + 1) / warm_up
    along = (step - warm_up) / max(1, steps - warm_up)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, along)))


class Training:
    """Runs the steps of a training run, with saving and resuming."""

    def __init__(self, config: TrainConfig, student: Any, softmax: Softmax, data: TrainingData, steps: int, device: str,
                 show: Callable[[str], None]) -> None:  # fmt: skip
        self.config, self.student, self.softmax, self.data = config, student, softmax, data
        self.steps, self.device, self.show = steps, device, show
        decayed = [p for p in student.parameters() if p.ndim > 1]
        other = [p for p in student.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": other, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=config.rate, betas=(0.9, 0.98), fused=True)
        self.step, self.seconds, self.saved = 0, 0.0, time.monotonic()
        config.output.mkdir(parents=True, exist_ok=True)
        if config.state.exists():
            self._take_up(torch.load(config.state, weights_only=True))

    def _take_up(self, state: dict[str, Any]) -> None:
        if state["steps"] != self.steps:
            raise ValueError(f"{self.config.state}: of a run of {state['steps']} steps, not {self.steps}; remove it")
        self.student.load_state_dict(state["student"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.show(f"resuming from step {self.step}")

    def _save(self) -> None:
        state = {"student": self.student.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step,
                 "steps": self.steps, "seconds": self.seconds}  # fmt: skip
        partial = self.config.state.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.config.state)

    def run(self) -> float:
        """Trains to the last step; returns the seconds that it took, including runs before an interruption."""
        self.student.train()
        epoch = first = 0
        lengths = [(len(s.prompt), len(s.answer)) for s in self.data.train]
        while self.step < self.steps:
            rng = np.random.default_rng([self.config.seed, epoch])
            upcoming = batch_groups(lengths, self.config.batch, rng)
            if self.step < first + len(upcoming):
                self._epoch(upcoming[self.step - first :])
            first += len(upcoming)
            epoch += 1
        return self.seconds

    def _epoch(self, groups: Sequence[list[int]]) -> None:
        last_show = time.monotonic()
        loss_sum = agreed = tokens = 0.0
        for group in groups:
            if self.step >= self.steps:
                return
            began = time.monotonic()
            loss, hits, n = self._one(group)
            now = time.monotonic()
            self.seconds += now - began
            loss_sum, agreed, tokens = loss_sum + loss * n, agreed + hits, tokens + n
            self.step += 1
            if now - last_show > 20 or self.step == self.steps:
                left = self.seconds / self.step * (self.steps - self.step) / 60
                self.show(
                    f"step {self.step:,} of {self.steps:,}: loss {loss_sum / tokens:.3f}, agreement"
                    f" {agreed / tokens:.3f}, {tokens / (now - last_show):,.0f} tokens/s, {left:.0f} min left"
                )
                loss_sum = agreed = tokens = 0.0
                last_show = now
            if now - self.saved > 60 * self.config.save_minutes:
                self._save()
                self._show_held_out()
                self.saved = last_show = time.monotonic()

    def _show_held_out(self) -> None:
        counts = agreement(self.student, self.data.held_out[:400])
        self.show("held out: " + ", ".join(f"{k} {h / n:.3f}" for k, (h, n) in counts.items()))

    def _one(self, group: list[int]) -> tuple[float, int, int]:
        rate = rate_at(self.step, self.steps, self.config.warm_up) * self.config.rate
        for part in self.optimizer.param_groups:
            part["lr"] = rate
        torch.manual_seed(self.config.seed * 1_000_003 + self.step)
        said = [self.data.train[i] for i in group]
        rng = np.random.default_rng([self.config.seed, self.step])
        twice = copies(said, round(self.config.copies * len(said)), rng)
        batch = make_batch([*said, *twice]).to(self.device)
        with torch.autocast(self.device, torch.bfloat16):
            loss, agreed = loss_of(self.student, batch, self.softmax, self.config.hard)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), 1.0)
        self.optimizer.step()
        return float(loss.detach()), int(agreed), len(batch.ids)
