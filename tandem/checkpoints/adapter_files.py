"""Reads LoRA adapters in PEFT's format."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tandem.checkpoints.adapter_config import CONFIG, MOST_RANK, AdapterConfig, read_config
from tandem.checkpoints.locate import CheckpointError, first_line
from tandem.checkpoints.numbers import STORAGE, Floats, Stored

WEIGHTS = "adapter_model.safetensors"
_KEY = re.compile(r"base_model\.model\.(?P<module>[\w.-]+)\.lora_(?P<side>[AB])\.weight")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}")


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
    """Adds up [outputs, rank] @ (down [rank, inputs] @ x) * scale to a linear layer; float32, contiguous."""

    down: Floats
    up: Floats
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
