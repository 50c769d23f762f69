"""Configuration of a head's training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tandem_train.command import setting


@dataclass(frozen=True, slots=True)
class HeadTrainConfig:
    data: Path = setting("folder that generate wrote")
    output: Path = setting("folder for the head")
    target: str | None = setting("target, if not the embedded one", None, "target_model")
    vocabulary: int = setting("most columns of the narrowed head", 8192)
    intermediate: int | None = setting("feed-forward width, if not the target's", None)
    steps: int = setting("steps of the training-time test", 5)
    decay: float = setting("weight of each step over the one before", 0.8)
    hard: float = setting("weight of the target's first choice against its distribution", 0.5)
    epochs: float = setting("times the data is seen", 4.0)
    batch: int = setting("answered tokens per step", 1024)
    rate: float = setting("learning rate", 1e-3)
    warm_up: int = 100
    weight_decay: float = 0.01
    dtype: str = setting("of the file: bfloat16, float16 or float32", "bfloat16")
    seed: int = setting("seed of weights and order", 1)
    save_minutes: float = setting("minutes between saved states", 3.0)
    device: str = setting("cpu, cuda or auto", "auto")
    layers: tuple[int, ...] | None = setting("target layers to read, such as 2,15,27, not as vLLM", None)

    def __post_init__(self) -> None:
        if self.epochs <= 0 or self.rate <= 0:
            raise ValueError(f"epochs and rate: {self.epochs} and {self.rate} must be above 0")
        for name in ("vocabulary", "steps", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is below 1")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay: {self.decay} is outside (0, 1]")
        if not 0 <= self.hard <= 1:
            raise ValueError(f"hard: {self.hard} is outside [0, 1]")
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"dtype: {self.dtype!r} is not one of bfloat16, float16, float32")

    @property
    def state(self) -> Path:
        """The file that resumes an interrupted run."""
        return self.output / "training_state.pt"
