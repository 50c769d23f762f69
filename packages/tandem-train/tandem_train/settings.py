"""Configurations of trainings."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tandem_train.command import setting
from tandem_train.student import StudentConfig

HELD_OUT = 50  # every 50th prompt is held out, with all its continuations


@dataclass(frozen=True, slots=True)
class RunConfig:
    """hard: weight of the target's first choice against its distribution."""

    data: Path = setting("folder that generate wrote")
    output: Path = setting("folder for what is trained")
    target: str | None = setting("target, if not the embedded one", None, "target_model")
    epochs: float = setting("times the data is seen", 4.0)
    batch: int = setting("answered tokens per step", 2048)
    rate: float = setting("learning rate", 3e-3)
    hard: float = setting("weight of the target's first choice, 0 to 1", 0.5)
    seed: int = setting("seed of weights and order", 1)
    device: str = setting("cpu, cuda or auto", "auto")
    warm_up: int = 100
    weight_decay: float = 0.02
    save_minutes: float = 3.0

    def __post_init__(self) -> None:
        for name in ("epochs", "rate", "batch"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: {getattr(self, name)} is not above 0")
        if not 0 <= self.hard <= 1:
            raise ValueError(f"hard: {self.hard} is outside [0, 1]")

    @property
    def state(self) -> Path:
        """The file that resumes an interrupted run."""
        return self.output / "training_state.pt"


@dataclass(frozen=True, slots=True)
class TrainConfig(RunConfig):
    """Of a draft. softmax: the most frequent tokens, in every step's softmax; others: of the rest, sampled into it.

    copies: sequences with a repeated span that are made from the data, per sequence of it.
    """

    student: StudentConfig = field(default_factory=StudentConfig)
    softmax: int = 12_288
    others: int = 1024
    copies: float = 0.25


@dataclass(frozen=True, slots=True)
class HeadTrainConfig(RunConfig):
    batch: int = setting("answered tokens per step", 1024)
    rate: float = setting("learning rate", 1e-3)
    weight_decay: float = 0.01
    vocabulary: int = setting("most columns of the narrowed head", 8192)
    intermediate: int | None = setting("feed-forward width, if not the target's", None)
    steps: int = setting("steps of the training-time test", 5)
    decay: float = setting("weight of each step over the one before", 0.8)
    dtype: str = setting("of the file: bfloat16, float16 or float32", "bfloat16")
    layers: tuple[int, ...] | None = setting("target layers to read, such as 2,15,27, not as vLLM", None)

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)
        for name in ("vocabulary", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is below 1")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay: {self.decay} is outside (0, 1]")
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"dtype: {self.dtype!r} is not one of bfloat16, float16, float32")
