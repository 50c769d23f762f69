"""Defines the configuration of an EAGLE-1 head's training run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Eagle1TrainConfig:
    """data: the folder that generate and features wrote; its features must include the target's last layer.

    intermediate: of the feed-forward layer; None: the target's. regression, classification: weights of the two losses.
    noise: the width of the uniform noise on the hidden states that the head reads. held_out_kinds: kinds of prompts
    kept out of training, to be measured apart. batch: answered tokens per step.
    """

    data: Path
    output: Path
    target: str | None = None
    intermediate: int | None = None
    regression: float = 1.0
    classification: float = 0.1
    noise: float = 0.2
    epochs: float = 4.0
    batch: int = 1024
    rate: float = 5e-4
    warm_up: int = 100
    max_tokens: int | None = None
    held_out_kinds: tuple[str, ...] = ()
    dtype: str = "bfloat16"
    device: str = "cpu"
    seed: int = 1
    save_minutes: float = 3.0

    def __post_init__(self) -> None:
        for name in ("epochs", "rate"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name)} is not above 0")
        for name in ("regression", "classification", "noise"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: {getattr(self, name)} is below 0")
        if not self.regression + self.classification:
            raise ValueError("regression: it and classification are both 0, which teaches nothing")
        if self.batch < 1:
            raise ValueError(f"batch: {self.batch} is below 1")
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"dtype: {self.dtype!r} is not one of bfloat16, float16, float32")

    @property
    def state(self) -> Path:
        """The file from which an interrupted run is resumed."""
        return self.output / "training_state.pt"
