"""Packs the weights of a Llama-family model for the C++ step."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.checkpoints.adapter_files import Adapter, LowRank
from tandem.checkpoints.family_configs import MATRICES, FamilyConfig, matrix_name
from tandem.checkpoints.family_weights import EMBEDDING, HEAD, NORM, FamilyWeights
from tandem.checkpoints.numbers import DTYPES as NAMES
from tandem.checkpoints.numbers import Stored, of_floats
from tandem.runners.native import NativeUnavailable, library
from tandem.runners.native.library import LayerAdapter, LayerWeights, ints
from tandem.runners.native.rotary import rotary_tables
from tandem.runners.native.steps import NativeFeatures, NativeSteps, Threads, check_steps, features_of
from tandem.runners.native.weights import UNQUANTISED, Packing, Weight

ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu")  # numbered as in vectors.h
_PATH = re.compile(r"model\.layers\.(\d+)\.(?:self_attn\.([qkvo])|mlp\.(gate|up|down))_proj")


class NativeModel(NativeSteps):
    """A model's steps in `dtype`; weights are copied, the embedding is shared. `configured`: maximum length."""

    def __init__(
        self,
        weights: FamilyWeights,
        dtype: str,
        threads: Threads,
        slots: int,
        length: int,
        most_tokens: int,
        draft_vocab: Sequence[int] | None = None,
        packing: Packing = UNQUANTISED,
        configured: int = 0,
    ) -> None:
        config = weights.config
        check(config, dtype)
        embedding = weights.stored(EMBEDDING).to(dtype).own()
        kept = "float32" if config.family.wide_rope else dtype
        tables = [rotary_tables(rope, config.head_dim, length, kept, configured) for rope in config.ropes]
        cache, layers = (slots, length, most_tokens), config.num_hidden_layers
        form = {**_form(config, dtype), "short_cache": packing.quantises}
        super().__init__(threads, dtype, config, layers, cache, embedding, tables, draft_vocab, **form)
        self.packing, self._config, self._cache = packing, config, (slots, length)
        self._pack(weights, packing)

    def _pack(self, weights: FamilyWeights, packing: Packing) -> None:
        for index in range(self.layer_count):
            layer, _kept = self._layer(weights, index, packing)
            self.done(self.library.tandem_set_layer(self.handle, index, ctypes.byref(layer)))
        tied, wanted = self._config.tie_word_embeddings, None if self.draft_vocab is None else self.draft_vocab.tolist()
        output = (lambda: self.embedding) if tied else (lambda: weights.stored(HEAD).to(self.dtype))
        head, _kept = packing.output(self.library, self.embedding.shape, output, wanted)
        norm = self._norm(weights, NORM)
        self.done(self.library.tandem_set_head(self.handle, norm.ctypes.data, ctypes.byref(head)))

    def _layer(self, weights: FamilyWeights, index: int, packing: Packing) -> tuple[LayerWeights, object]:
        """The layer, and the owners of its memory."""
        config, of = self._config, f"model.layers.{index}."
        names = config.norm_names
        if config.family.head_norms:
            names |= {f"{name}_norm": f"self_attn.{name}_norm" for name in "qk"}
        norms = {place: self._norm(weights, f"{of}{name}.weight") for place, name in names.items()}
        made = {}
        for name in MATRICES:
            made[name] = packing.matrix(
                self.library, index, name, config.shape(name), *self._linear(weights, index, name)
            )
        parts: dict[str, Any] = {place: norm.ctypes.data for place, norm in norms.items()}
        parts |= {name: matrix for name, (matrix, _) in made.items()}
        parts |= self.sight(config.rope_of(index), config.window_of(index))
        return LayerWeights(**parts), (norms, made)

    def _linear(self, weights: FamilyWeights, index: int, name: str) -> tuple[Weight, Stored | None]:
        place, biased = matrix_name(index, name), name in self._config.biases
        bias = weights.stored(place.removesuffix("weight") + "bias").to(self.dtype) if biased else None
        return lambda: weights.stored(place).to(self.dtype), bias

    def _norm(self, weights: FamilyWeights, name: str) -> NDArray[Any]:
        """A norm's weights, then its biases if any."""
        names = [name, name.removesuffix("weight") + "bias"] if self._config.family.norm == "layer" else [name]
        return np.concatenate([weights.stored(each).to(self.dtype).values for each in names])

    def hand_out(self, layers: Sequence[int]) -> NativeFeatures:
        """Steps also write the hidden states after `layers` from now on."""
        slots, length = self._cache
        shape = slots, length, len(layers) * int(self.sizes.hidden)
        self.own_features = made = features_of(shape, NAMES[self.dtype], self.embedding)
        self.library.tandem_hand_out(self.handle, ints(layers), len(layers), made.values.ctypes.data)
        return made

    def put_adapter(self, number: int, adapter: Adapter) -> None:
        """Copies a LoRA adapter. Raises ValueError if it is of another model."""
        layers = self._by_layer(adapter)
        short = self.library.tandem_put_adapter(self.handle, number)
        for index in range(self.layer_count):
            parts = layers.get(index, {})
            layer = LayerAdapter(*(_passed(parts.get(name)) for name in MATRICES))
            short = short or self.library.tandem_set_adapter_layer(self.handle, number, index, ctypes.byref(layer))
        if short:
            raise ValueError(f"adapters: {adapter.name}: memory is short")

    def _by_layer(self, adapter: Adapter) -> dict[int, dict[str, LowRank]]:
        layers: dict[int, dict[str, LowRank]] = {}
        for path, part in adapter.parts.items():
            match = _PATH.fullmatch(path)
            if match is None or int(match[1]) >= self.layer_count:
                raise ValueError(
                    f"adapters: {adapter.name}: the model's steps have no matrix {path} that takes an adapter"
                )
            name = match[2] or match[3]
            own, its = self._config.shape(name), (part.up.shape[0], part.down.shape[1])
            if its != own:
                raise ValueError(f"adapters: {adapter.name}: {path} is {own} in the model, the adapter's {its}")
            layers.setdefault(int(match[1]), {})[name] = part
        return layers


def _passed(part: LowRank | None) -> library.LowRankPointers:
    if part is None:
        return library.LowRankPointers()
    return library.LowRankPointers(part.down.ctypes.data, part.up.ctypes.data, part.rank, part.scale)


def check(config: FamilyConfig, dtype: str) -> None:
    """Raises NativeUnavailable unless the C++ step computes this model."""
    if config.hidden_act not in ACTIVATIONS:
        raise NativeUnavailable(f"hidden_act {config.hidden_act} (there are {', '.join(ACTIVATIONS)})")
    if config.parallel:
        raise NativeUnavailable("attention and MLP that read the same input (parallel)")
    sizes = {"hidden_size": config.hidden_size, "head_dim": config.head_dim}
    check_steps(dtype, config.ropes, **sizes, intermediate_size=config.intermediate_size)


def _form(config: FamilyConfig, dtype: str) -> dict[str, float]:
    """Fields of ModelShape that are not as in a Llama."""
    family = config.family
    # Gemma's embedding scale is rounded to `dtype`; others are whole numbers
    embedding_scale = of_floats(np.array([config.embedding_scale], np.float32)).to(dtype).floats()[0]
    return {
        "scale": config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
        "norm_offset": family.norm_offset,
        "attention_cap": config.attention_cap,
        "logit_cap": config.logit_cap,
        "embedding_scale": _but_one(float(embedding_scale)),
        "residual_scale": _but_one(config.residual_scale),
        "logit_scale": _but_one(config.logit_scale),
        "activation": ACTIVATIONS.index(config.hidden_act),
        "layer_norm": family.norm == "layer",
        "rounds_once": family.rounds_once,
        "row_norms": family.head_norms == "row",
        "wide_rope": family.wide_rope,
    }


def _but_one(scale: float) -> float:
    # the library takes 0 for 1
    return 0.0 if scale == 1 else scale
