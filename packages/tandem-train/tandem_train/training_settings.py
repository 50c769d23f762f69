"""Configurations of trainings."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tandem.cli.option import INTS, OptionParser, built, flags_of, option

Config = TypeVar("Config")


def run_command(about: str, kind: type[Config], argv: Sequence[str] | None, work: Callable[[Config], None]) -> int:
    """Parses the fields of a configuration; prints a ValueError as one line."""
    parser = OptionParser(argparse.Namespace, flags_of(kind), description=about)
    options = parser.parse_args(argv)
    if missing := [name for name in ("data", "output") if getattr(options, name, "") is None]:
        parser.error(f"--{missing[0]} is needed")
    try:
        work(built(kind, options))
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


def show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


HELD_OUT = 50  # every 50th prompt is held out, with all its continuations


@dataclass(frozen=True, slots=True)
class RunConfig:
    """hard: weight of the target's first choice against its distribution."""

    data: Path = option("folder that generate wrote", group="training")
    output: Path = option("folder for what is trained")
    target_model: str | None = option("target, if not the embedded one")
    epochs: float = option("times the data is seen", default=4.0)
    batch: int = option("answered tokens per step", default=2048)
    rate: float = option("learning rate", default=3e-3)
    hard: float = option("weight of the target's first choice, 0 to 1", default=0.5)
    seed: int = option("seed of weights and order", default=1)
    device: str = option("cpu, cuda or auto", default="auto")
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

    hidden: int = option("hidden size", default=160)
    layers: int = option("decoder layers", default=2)
    heads: int = option("attention heads", default=5)
    feed_forward: int = option("width of the feed-forward layers", default=1024)
    softmax: int = 12_288
    others: int = 1024
    copies: float = 0.25

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)
        for name in ("hidden", "layers", "heads", "feed_forward"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name.replace('_', '-')}: {getattr(self, name)} is below 1")
        if self.hidden % (2 * self.heads):
            raise ValueError(f"heads: {self.heads} heads of even size do not make a hidden size of {self.hidden}")


@dataclass(frozen=True, slots=True)
class HeadTrainConfig(RunConfig):
    batch: int = option("answered tokens per step", default=1024)
    rate: float = option("learning rate", default=1e-3)
    weight_decay: float = 0.01
    vocabulary: int = option("most columns of the narrowed head", default=8192)
    intermediate: int | None = option("feed-forward width, if not the target's")
    steps: int = option("steps of the training-time test", default=5)
    decay: float = option("weight of each step over the one before", default=0.8)
    dtype: str = option("of the file: bfloat16, float16 or float32", default="bfloat16")
    layers: INTS = option("target layers to read, such as 2,15,27, not as vLLM")

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)
        for name in ("vocabulary", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is below 1")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay: {self.decay} is outside (0, 1]")
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"dtype: {self.dtype!r} is not one of bfloat16, float16, float32")
