"""A target's hidden states by slot and position, on its device: a cache like that of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tandem.checkpoints.numbers import Stored
from tandem.runners.capabilities import FeatureRow
from tandem.runners.native.steps import NativeFeatures


@dataclass(frozen=True, slots=True)
class TargetFeatures:
    """values [slots, length, 3 * hidden], written by steps; the target's embedding [vocabulary, hidden]."""

    values: Tensor
    embedding: Tensor

    def at(self, slots: Tensor, positions: Tensor) -> Tensor:
        # values that are not finite become 0, or they would spread through the head's cache
        length = self.values.shape[1]
        found = self.values[slots[:, None], positions.clamp(0, length - 1)]
        return torch.where((positions >= 0)[..., None], found, 0).nan_to_num(0.0, 0.0, 0.0)

    def read(self, rows: Sequence[FeatureRow]) -> list[NDArray[np.float32]]:
        """Copies each row's features [count, 3 * hidden] to the host."""
        counts = [row.count for row in rows]
        slots = torch.tensor([row.slot for row in rows for _ in range(row.count)], dtype=torch.int64)
        positions = torch.tensor([row.start + i for row in rows for i in range(row.count)], dtype=torch.int64)
        found = self.values[slots.to(self.values.device), positions.to(self.values.device)].float().cpu()
        return [part.numpy() for part in found.split(counts)]


def tensor_of(stored: Stored) -> Tensor:
    """A tensor in numpy's memory; a copy if that is read-only."""
    values = stored.values if stored.values.flags.writeable else stored.values.copy()
    made = torch.from_numpy(values)
    return made.view(torch.bfloat16) if stored.dtype == "BF16" else made


def of_native(features: NativeFeatures) -> TargetFeatures:
    """The features of native steps, sharing memory."""
    return TargetFeatures(tensor_of(features.stored), tensor_of(features.embedding))


def tap(module: Any, layers: Sequence[int]) -> None:
    """Runs of the module leave hidden states after `layers` in `caught` of their cache. Raises ValueError."""
    decoders = decoder_layers(module)
    for layer in sorted(set(layers)):
        if layer < len(decoders):
            decoders[layer].register_forward_pre_hook(_before(layer), with_kwargs=True)
        else:
            decoders[-1].register_forward_hook(_after(layer), with_kwargs=True)


def _before(layer: int) -> Any:
    def catch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _cache(kwargs).caught[layer] = args[0] if args else kwargs["hidden_states"]

    return catch


def _after(layer: int) -> Any:
    def catch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        _cache(kwargs).caught[layer] = output[0] if isinstance(output, tuple) else output

    return catch


def _cache(kwargs: dict[str, Any]) -> Any:
    return kwargs["layer_past" if "layer_past" in kwargs else "past_key_values"]  # GPT-NeoX has the former


def decoder_layers(module: Any) -> nn.ModuleList:
    """The decoder layers of a Llama or Qwen kind of model. Raises ValueError."""
    layers = getattr(module.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(
            f"draft: an EAGLE head reads a decoder's layers, and {module.config.model_type} has none named so"
        )
    return layers
