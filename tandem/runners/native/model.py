"""Packs the weights of a Llama-family model for the C++ step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.checkpoints.family import FamilyConfig
from tandem.checkpoints.family_weights import EMBEDDING, HEAD, NORM, FamilyWeights, matrix_name
from tandem.checkpoints.numbers import DTYPES as NAMES
from tandem.checkpoints.numbers import of_floats
from tandem.runners.native.features import NativeFeatures, features_of
from tandem.runners.native.library import MATRICES, LayerWeights, ModelShape, ints
from tandem.runners.native.rotary import rotary_tables
from tandem.runners.native.steps import DTYPES, NativeSteps, NotNative, Threads, check_rope, check_sizes
from tandem.runners.native.weights import UNQUANTISED, Linear, Packing

ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu")  # numbered as in vectors.h


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
        outputs = config.vocab_size if draft_vocab is None else len(draft_vocab)
        sizes = _shape(config, outputs, slots, length, most_tokens, threads.count)
        sizes.embedding_scale = _but_one(embedding_scale(config, dtype))
        embedding = weights.stored(EMBEDDING).to(dtype)
        self.configured, kept = configured, "float32" if config.wide_rope else dtype
        tables = [rotary_tables(rope, config.head_dim, length, kept, configured) for rope in config.ropes]
        super().__init__(threads, dtype, sizes, embedding.own(), tables, config.vocab_size, draft_vocab)
        self.packing, self._cache = packing, (slots, length)
        self._pack(weights, packing)

    def _pack(self, weights: FamilyWeights, packing: Packing) -> None:
        for index in range(weights.config.num_hidden_layers):
            layer, _kept = self._layer(weights, index, packing)
            self.done(self.library.tandem_set_layer(self.handle, index, ctypes.byref(layer)))
        wanted = None if self.draft_vocab is None else self.draft_vocab.tolist()
        head, _kept = packing.output(self._head(weights), wanted)
        norm = norm_weight(weights, NORM, self.dtype)
        self.done(self.library.tandem_set_head(self.handle, norm.ctypes.data, ctypes.byref(head)))

    def _layer(self, weights: FamilyWeights, index: int, packing: Packing) -> tuple[LayerWeights, object]:
        config, of = weights.config, f"model.layers.{index}."
        norms = {
            place: norm_weight(weights, f"{of}{name}.weight", self.dtype) for place, name in norms_of(config).items()
        }
        made = {
            name: packing.matrix(index, name, linear(weights, matrix_name(index, name), self.dtype, name))
            for name in MATRICES
        }
        parts: dict[str, Any] = {place: norm.ctypes.data for place, norm in norms.items()}
        parts |= {name: matrix for name, (matrix, _) in made.items()}
        parts |= self.sight(config.rope_of(index), config.window_of(index))
        return LayerWeights(**parts), (norms, made)

    def _head(self, weights: FamilyWeights) -> Linear:
        if weights.config.tie_word_embeddings:
            return Linear((weights.config.vocab_size, weights.config.hidden_size), lambda: self.embedding)
        return linear(weights, HEAD, self.dtype)

    def hand_out(self, layers: Sequence[int]) -> NativeFeatures:
        """Steps also write the hidden states after `layers` from now on."""
        slots, length = self._cache
        shape = slots, length, len(layers) * int(self.sizes.hidden)
        self.own_features = made = features_of(shape, NAMES[self.dtype], self.embedding)
        self.library.tandem_hand_out(self.handle, ints(layers), len(layers), made.values.ctypes.data)
        return made


def linear(weights: FamilyWeights, name: str, dtype: str, matrix: str = "") -> Linear:
    config, bias = weights.config, name.removesuffix("weight") + "bias"
    shape = config.shape(matrix) if matrix else (config.vocab_size, config.hidden_size)
    own = weights.stored(bias).to(dtype) if matrix in config.biases else None
    return Linear(shape, lambda: weights.stored(name).to(dtype), own)


def norms_of(config: FamilyConfig) -> dict[str, str]:
    """Names of a layer's norms by their fields in LayerWeights."""
    return config.norm_names | {f"{name}_norm": f"self_attn.{name}_norm" for name in "qk" if config.norms.heads}


def norm_weight(weights: FamilyWeights, name: str, dtype: str) -> NDArray[Any]:
    """A norm's weights, then its biases if any."""
    names = [name, name.removesuffix("weight") + "bias"] if weights.config.norms.kind == "layer" else [name]
    return np.concatenate([weights.stored(each).to(dtype).values for each in names])


def check(config: FamilyConfig, dtype: str) -> None:
    """Raises NotNative unless the C++ step computes this model."""
    if dtype not in DTYPES:
        raise NotNative(f"weights in {dtype} (there are float32 and bfloat16)")
    if config.hidden_act not in ACTIVATIONS:
        raise NotNative(f"hidden_act {config.hidden_act} (there are {', '.join(ACTIVATIONS)})")
    if config.parallel:
        raise NotNative("attention and MLP that read the same input (parallel)")
    for rope in config.ropes:
        check_rope(rope)
    check_sizes(config.hidden_size, config.head_dim, config.intermediate_size)


def _shape(config: FamilyConfig, outputs: int, slots: int, length: int, most_tokens: int, threads: int) -> ModelShape:
    norms, scale = config.norms, config.attention_scale
    return ModelShape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate_size,
        outputs=outputs,
        vocabulary=config.vocab_size,
        slots=slots,
        length=length,
        most_tokens=most_tokens,
        threads=threads,
        epsilon=config.rms_norm_eps,
        scale=config.head_dim**-0.5 if scale is None else scale,
        norm_offset=norms.offset,
        attention_cap=config.attention_cap,
        logit_cap=config.logit_cap,
        residual_scale=_but_one(config.residual_scale),
        logit_scale=_but_one(config.logit_scale),
        activation=ACTIVATIONS.index(config.hidden_act),
        layer_norm=norms.kind == "layer",
        rounds_once=norms.rounds_once,
        row_norms=norms.heads == "row",
        wide_rope=config.wide_rope,
    )


def embedding_scale(config: FamilyConfig, dtype: str) -> float:
    # Gemma's scale is rounded to `dtype`; others are whole numbers
    return float(of_floats(np.array([config.embedding_scale], np.float32)).to(dtype).floats()[0])


def _but_one(scale: float) -> float:
    # the library takes 0 for 1
    return 0.0 if scale == 1 else scale
