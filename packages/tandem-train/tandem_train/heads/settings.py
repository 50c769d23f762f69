"""Defines the configuration of a head's training run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tandem.checkpoints.head_config import LAYOUTS


@dataclass(frozen=True, slots=True)
class HeadTrainConfig:
    """data: the folder that generate and features wrote. vocabulary: columns of the narrowed head, at most.
    intermediate: of the feed-forward layer; None: the target's. steps: of the training-time test; each later one counts
    `decay` times as much. held_out_kinds: kinds of prompts kept out of training, to be measured apart. batch: answered
    tokens per step. hard: weight of the target's first choice against its distribution. features: stored ones, or
    computed by the target in every step, which needs no room on disk and pays on an accelerator."""

    data: Path
    output: Path
    target: str | None = None
    vocabulary: int = 8192
    intermediate: int | None = None
    steps: int = 5
    decay: float = 0.8
    hard: float = 0.5
    epochs: float = 4.0
    batch: int = 1024
    rate: float = 1e-3
    warm_up: int = 100
    weight_decay: float = 0.01
    max_tokens: int | None = None
    held_out_kinds: tuple[str, ...] = ()
    layout: str = "specforge"
    dtype: str = "bfloat16"
    seed: int = 1
    save_minutes: float = 3.0
    device: str = "auto"
    features: str = "stored"
    feature_layers: tuple[int, ...] | None = None

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
        if self.features not in ("stored", "computed"):
            raise ValueError(f"features: {self.features!r} is not one of stored, computed")
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout: {self.layout!r} is not one of {', '.join(LAYOUTS)}")
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"dtype: {self.dtype!r} is not one of bfloat16, float16, float32")

    @property
    def state(self) -> Path:
        """The file from which an interrupted run is resumed."""
        return self.output / "training_state.pt"
