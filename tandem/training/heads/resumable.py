"""Runs the steps of a head's training in a seeded order, saved every few minutes and resumed after an interruption."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from tandem.training.distill import batch_groups
from tandem.training.heads.data import HeadData, Placed
from tandem.training.loop import rate_at


class RunSettings(Protocol):
    """What a run needs of its configuration. `state`: the file from which it is resumed."""

    @property
    def output(self) -> Path: ...
    @property
    def state(self) -> Path: ...
    @property
    def batch(self) -> int: ...
    @property
    def rate(self) -> float: ...
    @property
    def warm_up(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def save_minutes(self) -> float: ...


class ResumableTraining(ABC):
    """Trains `head`, which is on its device, for `total` steps; a kind of head defines the loss of a step."""

    def __init__(
        self,
        settings: RunSettings,
        head: nn.Module,
        data: HeadData,
        total: int,
        show: Callable[[str], None],
        weight_decay: float,
    ) -> None:
        self._settings, self._head, self.data, self.total, self.show = settings, head, data, total, show
        self.optimizer = torch.optim.AdamW(
            head.parameters(), lr=settings.rate, betas=(0.9, 0.95), weight_decay=weight_decay
        )
        self.step, self.seconds, self.saved = 0, 0.0, time.monotonic()
        self.device = next(head.parameters()).device.type
        settings.output.mkdir(parents=True, exist_ok=True)
        if settings.state.exists():
            self._take_up(torch.load(settings.state, weights_only=True, map_location=self.device))

    @abstractmethod
    def loss_of(self, placed: list[Placed]) -> tuple[Tensor, Callable[[], str]]:
        """The loss of some sequences, and what describes it in a line of progress."""

    def _take_up(self, state: dict[str, Any]) -> None:
        if state["total"] != self.total:
            raise ValueError(f"{self._settings.state}: of a run of {state['total']} steps, not {self.total}; remove it")
        self._head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.show(f"resuming from step {self.step}")

    def save(self) -> None:
        """Writes what a later run resumes from, whole."""
        state = {"head": self._head.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step,
                 "total": self.total, "seconds": self.seconds}  # fmt: skip
        partial = self._settings.state.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self._settings.state)
        self.saved = time.monotonic()

    def run(self) -> float:
        """Trains to the last step; returns the seconds that it took, including runs before an interruption."""
        self._head.train()
        epoch = first = 0
        lengths = [(len(one.sequence.prompt), len(one.sequence.answer)) for one in self.data.train]
        while self.step < self.total:
            groups = batch_groups(lengths, self._settings.batch, np.random.default_rng([self._settings.seed, epoch]))
            for group in groups[max(0, self.step - first) :]:
                if self.step < self.total:
                    self._one(group)
            first += len(groups)
            epoch += 1
        self._head.eval()
        return self.seconds

    def _one(self, group: list[int]) -> None:
        began = time.monotonic()
        for part in self.optimizer.param_groups:
            part["lr"] = rate_at(self.step, self.total, self._settings.warm_up) * self._settings.rate
        loss, described = self.loss_of([self.data.train[i] for i in group])
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._head.parameters(), 0.5)
        self.optimizer.step()
        self.step += 1
        self.seconds += time.monotonic() - began
        if self.step % 50 == 0 or self.step == self.total:
            left = self.seconds / self.step * (self.total - self.step) / 60
            self.show(f"step {self.step:,} of {self.total:,}: {described()}, {left:.0f} min left")
        if time.monotonic() - self.saved > 60 * self._settings.save_minutes:
            self.save()
