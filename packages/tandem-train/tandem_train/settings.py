"""Defines the configuration of a training run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tandem_train.student import StudentConfig

HELD_OUT = 50  # every 50th prompt is held out, with all its continuations


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """batch: answered tokens per step. hard: weight of the target's first choice. softmax: how many of the
    most frequent tokens are in every step's softmax. others: how many of the rest are sampled into it.
    copies: sequences with a repeated span that are made from the data, per sequence of it.
    max_tokens: the most tokens of the data to use, for learning curves.
    start: a draft to continue training, whose shape is kept; `student` is used without one."""

    data: Path
    output: Path
    target: str | None = None
    student: StudentConfig = field(default_factory=StudentConfig)
    epochs: float = 4.0
    batch: int = 2048
    rate: float = 3e-3
    warm_up: int = 100
    hard: float = 0.5
    softmax: int = 12_288
    others: int = 1024
    copies: float = 0.25
    weight_decay: float = 0.02
    max_tokens: int | None = None
    seed: int = 1
    device: str = "auto"
    save_minutes: float = 3.0
    start: Path | None = None

    def __post_init__(self) -> None:
        if self.epochs <= 0 or self.rate <= 0:
            raise ValueError(f"epochs and rate: {self.epochs} and {self.rate} must be above 0")
        if self.batch < 1:
            raise ValueError(f"batch: {self.batch} is below 1")
        if not 0 <= self.hard <= 1:
            raise ValueError(f"hard: {self.hard} is outside [0, 1]")

    @property
    def state(self) -> Path:
        """The file from which an interrupted run is resumed."""
        return self.output / "training_state.pt"
