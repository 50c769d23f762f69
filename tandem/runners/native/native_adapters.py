"""Copies LoRA adapters into a NativeSteps."""

from __future__ import annotations

import ctypes
import re

from tandem.checkpoints.adapter_files import Adapter, LowRank
from tandem.runners.native import library
from tandem.runners.native.library import MATRICES, LayerAdapter, ModelShape
from tandem.runners.native.steps import NativeSteps

_PATH = re.compile(r"model\.layers\.(\d+)\.(?:self_attn\.([qkvo])|mlp\.(gate|up|down))_proj")


class NativeAdapters:
    """The adapters of one model."""

    def __init__(self, model: NativeSteps) -> None:
        self._model = model

    def put(self, number: int, adapter: Adapter) -> None:
        layers = _by_layer(adapter, self._model.sizes)
        steps, handle = self._model.library, self._model.handle
        short = steps.tandem_put_adapter(handle, number)
        for index in range(self._model.layer_count):
            parts = layers.get(index, {})
            layer = LayerAdapter(*(_passed(parts.get(name)) for name in MATRICES))
            short = short or steps.tandem_set_adapter_layer(handle, number, index, ctypes.byref(layer))
        if short:
            raise ValueError(f"adapters: {adapter.name}: memory is short")


def _by_layer(adapter: Adapter, sizes: ModelShape) -> dict[int, dict[str, LowRank]]:
    layers: dict[int, dict[str, LowRank]] = {}
    for path, part in adapter.parts.items():
        match = _PATH.fullmatch(path)
        if match is None or int(match[1]) >= sizes.layers:
            raise ValueError(f"adapters: {adapter.name}: the model's steps have no matrix {path} that takes an adapter")
        name = match[2] or match[3]
        outputs, inputs = part.up.shape[0], part.down.shape[1]
        if (outputs, inputs) != _size(sizes, name):
            own = _size(sizes, name)
            raise ValueError(f"adapters: {adapter.name}: {path} is {own} in the model, the adapter's {outputs, inputs}")
        layers.setdefault(int(match[1]), {})[name] = part
    return layers


def _size(sizes: ModelShape, name: str) -> tuple[int, int]:
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    outputs = {"q": queries, "k": keys, "v": keys, "gate": sizes.intermediate, "up": sizes.intermediate}
    inputs = {"o": queries, "down": sizes.intermediate}
    return outputs.get(name, sizes.hidden), inputs.get(name, sizes.hidden)


def _passed(part: LowRank | None) -> library.LowRank:
    if part is None:
        return library.LowRank(None, None, 0, 0.0)
    return library.LowRank(part.down.ctypes.data, part.up.ctypes.data, part.rank, part.scale)
