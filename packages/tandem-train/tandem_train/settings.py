"""Configuration of a draft's training."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tandem_train.command import setting
from tandem_train.student import StudentConfig

HELD_OUT = 50  # every 50th prompt is held out, with all its continuations


@dataclass(frozen=True, slots=True)
class TrainConfig:
    data: Path = setting("folder that generate wrote")
    output: Path = setting("folder for the draft")
    target: str | None = setting("target, if not the embedded one", None, "target_model")
    student: StudentConfig = field(default_factory=StudentConfig)
    epochs: float = setting("times the data is seen", 4.0)
    batch: int = setting("answered tokens per step", 2048)
    rate: float = setting("learning rate", 3e-3)
    warm_up: int = 100
    hard: float = setting("weight of the target's first choice, 0 to 1", 0.5)
    softmax: int = 12_288  # the most frequent tokens, in the softmax of every step
    others: int = 1024  # of the rest, sampled into it
    copies: float = 0.25  # sequences with a repeated span that are made from the data, per sequence of it
    weight_decay: float = 0.02
    seed: int = setting("seed of the order", 1)
    device: str = setting("cpu, cuda or auto", "auto")
    save_minutes: float = 3.0

    def __post_init__(self) -> None:
        if self.epochs <= 0 or self.rate <= 0:
            raise ValueError(f"epochs and rate: {self.epochs} and {self.rate} must be above 0")
        if self.batch < 1:
            raise ValueError(f"batch: {self.batch} is below 1")
        if not 0 <= self.hard <= 1:
            raise ValueError(f"hard: {self.hard} is outside [0, 1]")

    @property
    def state(self) -> Path:
        """The file that resumes an interrupted run."""
        return self.output / "training_state.pt"
