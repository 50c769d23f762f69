"""Reads LoRA adapters in PEFT's format; refuses by name what is not served."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tandem.checkpoints.json_files import an_object, data_of, read_object
from tandem.checkpoints.locate import CheckpointError, first_line
from tandem.checkpoints.numbers import STORAGE, Stored

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
MOST_RANK = 512
MOST_ALPHA = 2.0**16
_MOST_PATTERN = 512  # characters
_MOST_BYTES = 1 << 20  # a pattern for each layer of the largest models takes a tenth
_KEY = re.compile(r"base_model\.model\.(?P<module>[\w.-]+)\.lora_(?P<side>[AB])\.weight")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}")

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """`ranks`, `alphas`: overrides by module pattern. `by_root`: scale alpha / sqrt(rank). Raises ValueError."""

    rank: int
    alpha: float
    by_root: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, rank in (("r", self.rank), *((f"rank_pattern {key!r:.80}", r) for key, r in self.ranks.items())):
            if type(rank) is not int or not 1 <= rank <= MOST_RANK:
                raise ValueError(f"{name}: {rank!r:.60} is not a number from 1 to {MOST_RANK}")
        patterned = ((f"alpha_pattern {key!r:.80}", alpha) for key, alpha in self.alphas.items())
        for name, alpha in (("lora_alpha", self.alpha), *patterned):
            if type(alpha) not in (int, float) or not abs(alpha) <= MOST_ALPHA:
                raise ValueError(f"{name}: {alpha!r:.60} is not a number of at most {MOST_ALPHA:g}")
        for name, patterns in (("rank_pattern", self.ranks), ("alpha_pattern", self.alphas)):
            for pattern in patterns:
                _check_pattern(name, pattern)

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """Returns rank and scale for a path such as model.layers.0.self_attn.q_proj."""
        rank, alpha = _matched(self.ranks, module, self.rank), _matched(self.alphas, module, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.by_root else rank)


def _matched(values: Mapping[str, Value], module: str, default: Value) -> Value:
    # PEFT's rule: the first pattern that matches.
    found = (value for pattern, value in values.items() if re.match(rf"(.*\.)?({pattern})$", module))
    return next(found, default)


def _check_pattern(name: str, pattern: str) -> None:
    if len(pattern) > _MOST_PATTERN:
        raise ValueError(f"{name}: {pattern[:60]!r} is longer than {_MOST_PATTERN} characters")
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{name}: {pattern[:80]!r}: {error}") from None


def read_config(folder: Path) -> AdapterConfig:
    file = folder / CONFIG
    try:
        fields = read_object(file, _MOST_BYTES)
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no adapter: it has no {CONFIG}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from None
    try:
        _check_served(fields)
        if type(by_root := fields.get("use_rslora") or False) is not bool:
            raise ValueError(f"use_rslora: {by_root!r:.60} is neither true nor false")
        return AdapterConfig(
            fields.get("r", 8),
            fields.get("lora_alpha", 8),
            by_root,
            an_object("rank_pattern", fields.get("rank_pattern") or {}),
            an_object("alpha_pattern", fields.get("alpha_pattern") or {}),
        )
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from None


def _check_served(fields: Mapping[str, Any]) -> None:
    known = data_of("adapter_fields")  # read; harmless: of its making; refused, with the reason; starts: of training
    if fields.get("peft_type") != "LORA":
        raise ValueError(f"peft_type: {fields.get('peft_type')!r:.60} is not served, only LORA")
    for name, what in known["refused"].items():
        if fields.get(name):
            raise ValueError(f"{name}: not served: {what}")
    if fields.get("bias", "none") != "none":
        raise ValueError(f"bias: {fields['bias']!r:.60} is not served: biases")
    start = fields.get("init_lora_weights", True)
    if start not in known["starts"]:
        raise ValueError(f"init_lora_weights: {start!r:.60} is not served: it changes the model's own weights")
    for name, value in fields.items():
        if value and name not in (*known["harmless"], *known["read"]):
            raise ValueError(
                f"{name[:60]!r}: {str(value)[:60]!r} is not known here, so it may change what the adapter adds"
            )


@dataclass(frozen=True, slots=True)
class AdapterChoice:
    """The name in requests, and the folder (toy backend: parameters)."""

    name: str
    source: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"adapters: the name {self.name!r} is not 1 to 64 letters, digits and .:_-, a letter or digit first"
            )
        if not self.source:
            raise ValueError(f"adapters: {self.name}: no folder is named; write {self.name}=DIR")


def adapter_choices(given: str | None, field: str = "adapters") -> tuple[AdapterChoice, ...]:
    try:
        chosen = [AdapterChoice(*map(str.strip, each.partition("=")[::2])) for each in (given or "").split(",") if each]
    except ValueError as error:
        raise ValueError(f"{field}: {str(error).removeprefix('adapters: ')}") from None
    names = [each.name for each in chosen]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{field}: the name {name} is given twice")
    return tuple(chosen)


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """Adds up [outputs, rank] @ (down [rank, inputs] @ x) * scale to a linear layer.

    float32, contiguous: numpy's arrays; module code has tensors, zero-padded to powers of two inputs.
    """

    down: Any
    up: Any
    scale: float

    @property
    def rank(self) -> int:
        return int(self.down.shape[0])


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """`revision`: equal for equal files. `parts`: by linear layer."""

    name: str
    revision: str
    parts: Mapping[str, LowRank] = field(default_factory=dict)


def read_adapter(choice: AdapterChoice) -> Adapter:
    folder = Path(choice.source)
    if not folder.is_dir():
        raise CheckpointError(f"adapters: {choice.name}: {folder} is not a folder")
    config, file = read_config(folder), folder / WEIGHTS
    if not file.is_file():
        raise CheckpointError(f"{folder}: no adapter: it has no {WEIGHTS} (PEFT's .bin files are not read)")
    try:
        from safetensors import deserialize

        data = file.read_bytes()  # at once: the revision is that of what is read, also while the file is replaced
        tensors = {name: _tensor(found) for name, found in deserialize(data)}
    except Exception as error:  # of the file, or of safetensors: cut short, a dtype that numpy lacks
        raise CheckpointError(f"{file}: cannot be read: {first_line(error)}") from None
    parts = {module: _part(file, config, module, tensors) for module in _modules(file, tensors)}
    return Adapter(choice.name, _revision(config, data), parts)


def _tensor(found: Mapping[str, Any]) -> Stored:
    values = np.frombuffer(found["data"], STORAGE[found["dtype"]])
    return Stored(found["dtype"], values.reshape(found["shape"]))


def _modules(file: Path, names: Iterable[str]) -> list[str]:
    # Each layer has both matrices, and nothing else is in the file.
    found: dict[str, set[str]] = {}
    for name in names:
        match = _KEY.fullmatch(name)
        if match is None:
            raise CheckpointError(
                f"{file}: tensor {name[:99]!r} is not served: only lora_A and lora_B of linear layers"
            )
        found.setdefault(match["module"], set()).add(match["side"])
    if not found:
        raise CheckpointError(f"{file}: has no tensors")
    for module, sides in found.items():
        if len(sides) < 2:
            raise CheckpointError(f"{file}: {module} has lora_{min(sides)} alone")
    return sorted(found)


def _part(file: Path, config: AdapterConfig, module: str, tensors: Mapping[str, Stored]) -> LowRank:
    made = {}
    for side in "AB":
        tensor = tensors[f"base_model.model.{module}.lora_{side}.weight"]
        if len(tensor.shape) != 2 or not tensor.is_float:
            raise CheckpointError(f"{file}: lora_{side} of {module} is not a matrix of floating-point numbers")
        made[side] = np.array(tensor.floats(), order="C")  # its own memory, which may be written to
        if not np.isfinite(made[side]).all():
            raise CheckpointError(f"{file}: lora_{side} of {module} has numbers that are not finite")
    rank = made["A"].shape[0]
    if not 1 <= rank <= MOST_RANK or made["B"].shape[1] != rank:
        raise CheckpointError(
            f"{file}: {module} has matrices {made['A'].shape} and {made['B'].shape}, which share no rank "
            f"from 1 to {MOST_RANK}"
        )
    configured, scale = config.rank_and_scale(module)
    if rank != configured:
        raise CheckpointError(f"{file}: {module} has rank {rank}, and {CONFIG} says {configured}")
    return LowRank(made["A"], made["B"], scale)


def _revision(config: AdapterConfig, data: bytes) -> str:
    factors = (config.rank, config.alpha, config.by_root, sorted(config.ranks.items()), sorted(config.alphas.items()))
    return hashlib.sha256(repr(factors).encode() + hashlib.sha256(data).digest()).hexdigest()
