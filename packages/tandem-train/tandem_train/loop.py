"""The training loop: seeded order, saved every few minutes, resumable."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tandem_train.distill import Softmax, batch_groups, copies, loss_of, make_batch
from tandem_train.settings import RunConfig, TrainConfig
from tandem_train.shards import TrainingSequence


@dataclass(frozen=True, slots=True)
class TrainingData:
    """counts [vocabulary]: how often each token was among the target's best."""

    train: list[TrainingSequence]
    held_out: list[TrainingSequence]
    tokens: int
    counts: torch.Tensor


def rate_at(step: int, steps: int, warm_up: int) -> float:
    """Learning rate of a step: linear warm-up, then cosine decay to a fiftieth."""
    if step < warm_up:
        return (step + 1) / warm_up
    along = (step - warm_up) / max(1, steps - warm_up)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, along)))


class Resumable:
    """A resumable run of `total` steps in a seeded order.

    trained: the saved module. seconds: time in steps, earlier runs included.
    """

    def __init__(
        self,
        config: RunConfig,
        trained: Any,
        optimizer: torch.optim.Optimizer,
        total: int,
        show: Callable[[str], None],
    ) -> None:
        self._run, self._trained, self.optimizer, self.total, self.show = config, trained, optimizer, total, show
        self.device = next(trained.parameters()).device.type
        self.step, self.seconds, self.saved = 0, 0.0, time.monotonic()
        config.output.mkdir(parents=True, exist_ok=True)
        if config.state.exists():
            self._take_up(torch.load(config.state, weights_only=True, map_location=self.device))

    def _take_up(self, state: dict[str, Any]) -> None:
        if state["total"] != self.total:
            raise ValueError(f"{self._run.state}: of a run of {state['total']} steps, not {self.total}; remove it")
        self._trained.load_state_dict(state["trained"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.show(f"resuming from step {self.step}")

    def save(self) -> None:
        """Saves atomically."""
        state = {"trained": self._trained.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step,
                 "total": self.total, "seconds": self.seconds}  # fmt: skip
        partial = self._run.state.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self._run.state)
        self.saved = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether to save now."""
        return time.monotonic() - self.saved > 60 * self._run.save_minutes

    @property
    def minutes_left(self) -> float:
        return self.seconds / self.step * (self.total - self.step) / 60

    def groups(self, sequences: Sequence[TrainingSequence]) -> Iterator[list[int]]:
        """Batches of the remaining steps; call `count` between them."""
        lengths = [(len(one.prompt), len(one.answer)) for one in sequences]
        epoch = first = 0
        while self.step < self.total:
            groups = batch_groups(lengths, self._run.batch, np.random.default_rng([self._run.seed, epoch]))
            yield from groups[max(0, self.step - first) : self.total - first]
            first += len(groups)
            epoch += 1

    def set_rate(self) -> None:
        """Sets the optimizer's rate for this step."""
        for part in self.optimizer.param_groups:
            part["lr"] = rate_at(self.step, self.total, self._run.warm_up) * self._run.rate

    def count(self, began: float) -> None:
        """Counts a step that began at this time."""
        self.step += 1
        self.seconds += time.monotonic() - began


class Training(Resumable):
    def __init__(self, config: TrainConfig, student: Any, softmax: Softmax, data: TrainingData, steps: int,
                 show: Callable[[str], None]) -> None:  # fmt: skip
        decayed = [p for p in student.parameters() if p.ndim > 1]
        other = [p for p in student.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": other, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=config.rate, betas=(0.9, 0.98), fused=True)
        self.config, self.student, self.softmax, self.data = config, student, softmax, data
        super().__init__(config, student, optimizer, steps, show)

    def run(self) -> float:
        """Trains to the last step; returns the seconds, earlier runs included."""
        self.student.train()
        for group in self.groups(self.data.train):
            began = time.monotonic()
            loss, hits, tokens = self.train_group(group)
            self.count(began)
            if self.step % 50 == 0 or self.step == self.total:
                self.show(
                    f"step {self.step:,} of {self.total:,}: loss {loss:.3f}, agreement {hits / tokens:.3f},"
                    f" {self.minutes_left:.0f} min left"
                )
            if self.due:
                self.save()
        return self.seconds

    def train_group(self, group: list[int]) -> tuple[float, int, int]:
        """One step on a batch: loss, hits, tokens."""
        self.set_rate()
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
