"""Native steps of a transformers module that a test made, whose weights are read from its memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tandem.checkpoints.family_configs import UnsupportedFamily, family_of
from tandem.checkpoints.family_weights import rows_together
from tandem.checkpoints.head_config import HeadWeights, read_head_weights
from tandem.checkpoints.numbers import STORAGE, Stored
from tandem.runners.eagle.hidden_states import TargetFeatures, of_native, tensor_of
from tandem.runners.eagle.module import EagleHead, head_module
from tandem.runners.native import NativeUnavailable
from tandem.runners.native.load_native import load_native
from tandem.runners.native.native_runner import NativeRunner
from tandem.runners.native.steps import NativeFeatures
from tandem.runners.native.weights import UNQUANTISED, Packing
from tandem.runners.protocol import Limits, RunnerIdentity


class ModuleWeights:
    """Implements FamilyWeights."""

    def __init__(self, module: Any) -> None:
        try:
            self.config = family_of(module.config.to_dict())
        except UnsupportedFamily as error:
            raise NativeUnavailable(str(error)) from None
        self._tensors = dict(module.state_dict())
        for name, tensor in list(self._tensors.items()):
            for whole, parts in (("qkv_proj", "qkv"), ("gate_up_proj", ("gate", "up"))):
                for part in parts if whole in name else ():
                    self._tensors[name.replace(whole, f"{part}_proj")] = tensor[rows_together(self.config, part)]
        self.dtype = str(next(module.parameters()).dtype).removeprefix("torch.")

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def stored(self, name: str) -> Stored:
        return stored_of(self._tensors[name])

    def unused(self, wanted: Iterable[str]) -> list[str]:
        return []


def native_of(
    module: Any,
    threads: int,
    limits: Limits,
    identity: RunnerIdentity,
    verifies: bool,
    draft_vocab: Sequence[int] | None,
    packing: Packing = UNQUANTISED,
) -> NativeRunner:
    weights = ModuleWeights(module)
    return load_native(weights, weights.dtype, threads, limits, identity, verifies, draft_vocab, packing)


def torch_features(features: Any) -> TargetFeatures:
    """Features as module code reads them, in the memory that native steps write to."""
    if isinstance(features, TargetFeatures):
        return features
    assert isinstance(features, NativeFeatures)
    return of_native(features)


def stored_of(tensor: torch.Tensor) -> Stored:
    """The tensor as numpy, sharing contiguous memory."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype is torch.bfloat16:
        return Stored("BF16", tensor.view(torch.uint16).numpy())
    values = tensor.numpy()
    return Stored(next(name for name, kind in STORAGE.items() if np.dtype(kind) == values.dtype), values)


def read_head(folder: Path) -> tuple[EagleHead, torch.Tensor | None]:
    weights, embedding = read_head_weights(folder)
    return head_module(folder, weights), None if embedding is None else tensor_of(embedding)


def weights_of(head: EagleHead) -> HeadWeights:
    """A module's weights, sharing memory."""
    return HeadWeights(head.config, {name: stored_of(tensor) for name, tensor in head.state_dict().items()})
