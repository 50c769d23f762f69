"""Reads EAGLE-3 heads' weights in both layouts, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tandem.checkpoints.head_config import (
    EMBEDDING,
    FC,
    MAPS,
    OUTPUT,
    HeadConfig,
    head_shapes,
    our_name,
    read_head_config,
)
from tandem.checkpoints.locate import CheckpointError
from tandem.checkpoints.numbers import DTYPES, Stored
from tandem.checkpoints.tensors import Tensors


@dataclass(frozen=True, slots=True, eq=False)
class HeadWeights:
    """`tensors`: by SpecForge's names, parameters in one dtype, and both token maps."""

    config: HeadConfig
    tensors: Mapping[str, Stored]

    @property
    def token_ids(self) -> NDArray[np.int64]:
        offsets = self.tensors["d2t"].values.astype(np.int64)
        return offsets + np.arange(len(offsets))

    @property
    def parameters(self) -> int:
        return sum(stored.values.size for name, stored in self.tensors.items() if name not in MAPS)

    def shape(self, linear: str) -> tuple[int, int]:
        outputs, inputs = self.tensors[f"{linear}.weight"].shape
        return outputs, inputs

    def bias(self, linear: str, dtype: str) -> Stored | None:
        found = self.tensors.get(f"{linear}.bias")
        return found and found.to(dtype)

    def weight(self, module: str, dtype: str) -> Stored:
        return self.tensors[f"{module}.weight"].to(dtype)


def read_head_weights(folder: Path) -> tuple[HeadWeights, Stored | None]:
    """Returns a head in its `fc`'s dtype and its embedding [vocabulary, hidden], if any. Raises CheckpointError."""
    config = read_head_config(folder)
    tensors = Tensors(folder)
    found = {our_name(name): tensors.stored(name) for name in tensors.files}
    embedding = found.pop(EMBEDDING, None)
    if embedding is not None and embedding.shape != (config.vocab_size, config.hidden_size):
        raise CheckpointError(f"{folder}: {EMBEDDING} is {list(embedding.shape)}, not vocabulary by hidden size")
    if OUTPUT in found:
        _complete_vocabulary(config, found)
    required, optional = head_shapes(config)
    _check(folder, required | {name: optional[name] for name in MAPS}, found)
    dtype = next((name for name, kind in DTYPES.items() if kind == found[FC].dtype), "float32")
    made = HeadWeights(config, {name: each if name in MAPS else each.to(dtype) for name, each in found.items()})
    _check_vocabulary(folder, made)
    return made, embedding


def _complete_vocabulary(config: HeadConfig, found: dict[str, Stored]) -> None:
    # Heads of the whole vocabulary may lack both maps; t2d follows from d2t.
    if "d2t" not in found and config.draft_vocab_size == config.vocab_size:
        found["d2t"] = Stored("I64", np.zeros(config.vocab_size, dtype=np.int64))
    if "t2d" not in found and "d2t" in found:
        ids = found["d2t"].values.astype(np.int64).reshape(-1)
        ids = ids + np.arange(len(ids))
        drafted = np.zeros(config.vocab_size, dtype=np.bool_)
        drafted[ids[(ids >= 0) & (ids < config.vocab_size)]] = True
        found["t2d"] = Stored("BOOL", drafted)


def _check(folder: Path, wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, Stored]) -> None:
    if missing := sorted(set(wanted) - set(found)):
        raise CheckpointError(f"{folder}: the head lacks {', '.join(missing[:3])}")
    if unknown := sorted(set(found) - set(wanted)):
        raise CheckpointError(f"{folder}: the head has {', '.join(unknown[:3])}, which EAGLE-3 heads do not have here")
    for name, shape in wanted.items():
        if found[name].shape != shape:
            raise CheckpointError(f"{folder}: {name} is {list(found[name].shape)}, not {list(shape)}")


def _check_vocabulary(folder: Path, head: HeadWeights) -> None:
    ids = head.token_ids
    if ids.min() < 0 or ids.max() >= head.config.vocab_size or len(np.unique(ids)) != len(ids):
        raise CheckpointError(f"{folder}: d2t does not name {len(ids)} tokens of {head.config.vocab_size}")
