"""Configurations of trainings."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

Config = TypeVar("Config", bound=Any)


def setting(text: str, default: Any = MISSING, flag: str | None = None) -> Any:
    """A field with its help; `flag`: another name on the command line."""
    return field(default=default, metadata={"help": text, "flag": flag})


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


TYPES: dict[str, Callable[[str], Any]] = {
    "int": int, "float": float, "str": str, "Path": Path, "tuple[int, ...]": _numbers,
}  # fmt: skip


def run_command(about: str, kind: type[Config], argv: Sequence[str] | None, work: Callable[[Config], None]) -> int:
    """Parses the fields of a configuration; prints a ValueError as one line."""
    parser = argparse.ArgumentParser(description=about)
    for each in (each for each in fields(kind) if "help" in each.metadata):
        name = each.metadata["flag"] or each.name
        default = None if each.default is MISSING else each.default
        parser.add_argument(
            *dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}")),
            dest=each.name,
            type=TYPES[str(each.type).removesuffix(" | None")],
            required=each.default is MISSING,
            default=default,
            help=each.metadata["help"] + ("" if default is None else f" (default {default})"),
        )
    try:
        work(kind(**vars(parser.parse_args(argv))))
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

    hidden: int = setting("hidden size", 160)
    layers: int = setting("decoder layers", 2)
    heads: int = setting("attention heads", 5)
    feed_forward: int = setting("width of the feed-forward layers", 1024)
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
