"""A target's hidden states by slot and position, on its device: a cache like that of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tandem.runners.feature_rows import FeatureRow
from tandem.runners.native.steps import NativeFeatures
from tandem.runners.torch.from_tensors import tensor_of


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


def of_native(features: NativeFeatures) -> TargetFeatures:
    """The features of native steps, sharing memory."""
    return TargetFeatures(tensor_of(features.stored), tensor_of(features.embedding))


class Taps:
    """Copies hidden states out of a transformers module as it runs."""

    def __init__(self, module: Any, layers: Sequence[int], values: Tensor) -> None:
        self.values, self._caught = values, dict[int, Tensor]()
        self._layers, decoders = tuple(layers), decoder_layers(module)
        for layer in sorted(set(layers)):
            if layer < len(decoders):
                decoders[layer].register_forward_pre_hook(self._before(layer), with_kwargs=True)
            else:
                decoders[-1].register_forward_hook(self._after(layer))

    def _before(self, layer: int) -> Any:
        def catch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._caught[layer] = args[0] if args else kwargs["hidden_states"]

        return catch

    def _after(self, layer: int) -> Any:
        def catch(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._caught[layer] = output[0] if isinstance(output, tuple) else output

        return catch

    def caught(self) -> Tensor:
        """The last run's features [rows, width, 3 * hidden]."""
        return torch.cat([self._caught[layer] for layer in self._layers], dim=-1)

    def store(self, slots: Sequence[int], positions: Tensor) -> None:
        """Stores the last run's features at positions [rows, width] of `slots`."""
        which = torch.tensor(list(slots), device=positions.device)
        self.values[which[:, None], positions] = self.caught()
        self._caught.clear()


def decoder_layers(module: Any) -> nn.ModuleList:
    """The decoder layers of a Llama or Qwen kind of model. Raises ValueError."""
    layers = getattr(module.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(
            f"draft: an EAGLE head reads a decoder's layers, and {module.config.model_type} has none named so"
        )
    return layers
