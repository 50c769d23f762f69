"""Packs the weights of a model of the Llama family for the C++ step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tandem.checkpoints.family import FamilyConfig, Norms
from tandem.checkpoints.family_weights import EMBEDDING, HEAD, NORM, FamilyWeights, matrix_name
from tandem.checkpoints.numbers import DTYPES as NAMES
from tandem.runners.native.features import NativeFeatures, features_of
from tandem.runners.native.library import MATRICES, NORMS, LayerWeights, ModelShape, ints
from tandem.runners.native.rotary import rotary_tables
from tandem.runners.native.steps import DTYPES, NativeSteps, NotNative, Threads, check_rope, check_sizes
from tandem.runners.native.weights import UNQUANTISED, Linear, Packing

_TODAY: dict[str, Any] = {  # forms that the C++ step has; windows are checked by length (fits.py)
    **{"rope_of_layer": (), "attention_scale": None, "attention_cap": 0.0, "logit_cap": 0.0, "embedding_scale": 1.0},
    **{"residual_scale": 1.0, "logit_scale": 1.0, "parallel": False, "hidden_act": "silu"},
}
_NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")


class NativeModel(NativeSteps):
    """The steps of one model in `dtype`, whose weights are copied, except the embedding, which is shared.

    `most_tokens`: tokens that one step may feed in total.
    """

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
    ) -> None:
        config = weights.config
        check(config, dtype)
        outputs = config.vocab_size if draft_vocab is None else len(draft_vocab)
        sizes = _shape(config, outputs, slots, length, most_tokens, threads.count)
        embedding = weights.stored(EMBEDDING).to(dtype)
        tables = rotary_tables(config.ropes[0], config.head_dim, length, dtype)
        super().__init__(threads, dtype, sizes, embedding.own(), tables, config.vocab_size, draft_vocab)
        self.packing, self._cache = packing, (slots, length)
        self._pack(weights, packing)

    def _pack(self, weights: FamilyWeights, packing: Packing) -> None:
        """Copies the weights; of the head, only the rows of `draft_vocab`."""
        for index in range(weights.config.num_hidden_layers):
            layer, _kept = self._layer(weights, index, packing)
            self.done(self.library.tandem_set_layer(self.handle, index, ctypes.byref(layer)))
        wanted = None if self.draft_vocab is None else self.draft_vocab.tolist()
        head, _kept = packing.output(self._head(weights), wanted)
        norm = weights.stored(NORM).to(self.dtype)
        self.done(self.library.tandem_set_head(self.handle, norm.values.ctypes.data, ctypes.byref(head)))

    def _layer(self, weights: FamilyWeights, index: int, packing: Packing) -> tuple[LayerWeights, object]:
        """What the library packs for a layer, and what keeps its memory."""
        names = (f"model.layers.{index}.{name}.weight" for name in _NORMS)
        norms = [weights.stored(name).to(self.dtype) if name in weights else None for name in names]
        if not weights.config.norms.heads:
            norms[2:] = None, None
        made = {
            name: packing.matrix(index, name, linear(weights, matrix_name(index, name), self.dtype, name))
            for name in MATRICES
        }
        addresses = [None if norm is None else norm.values.ctypes.data for norm in norms]
        packed = {name: matrix for name, (matrix, _) in made.items()}
        return LayerWeights(**dict(zip(NORMS, addresses, strict=True)), **packed), (norms, made)

    def _head(self, weights: FamilyWeights) -> Linear:
        if weights.config.tie_word_embeddings:
            return Linear((weights.config.vocab_size, weights.config.hidden_size), lambda: self.embedding)
        return linear(weights, HEAD, self.dtype)

    def hand_out(self, layers: Sequence[int]) -> NativeFeatures:
        """From now on, steps also write the hidden states after so many `layers` (tandem/runners/eagle)."""
        slots, length = self._cache
        shape = slots, length, len(layers) * int(self.sizes.hidden)
        self.own_features = made = features_of(shape, NAMES[self.dtype], self.embedding)
        self.library.tandem_hand_out(self.handle, ints(layers), len(layers), made.values.ctypes.data)
        return made


def linear(weights: FamilyWeights, name: str, dtype: str, matrix: str = "") -> Linear:
    """The linear layer whose weight is called `name`; `matrix`: which of a layer's it is."""
    config, bias = weights.config, name.removesuffix("weight") + "bias"
    shape = config.shape(matrix) if matrix else (config.vocab_size, config.hidden_size)
    own = weights.stored(bias).to(dtype) if matrix in config.biases else None
    return Linear(shape, lambda: weights.stored(name).to(dtype), own)


def check(config: FamilyConfig, dtype: str) -> None:
    """Raises NotNative unless the C++ step computes what this model computes."""
    if dtype not in DTYPES:
        raise NotNative(f"weights in {dtype} (there are float32 and bfloat16)")
    if config != replace(config, **_TODAY) or config.norms not in (Norms(), Norms(heads="head")):
        raise NotNative(f"models of type {config.model_type} with norms, scales or embeddings of their own")
    check_rope(config.ropes[0])
    check_sizes(config.hidden_size, config.head_dim, config.intermediate_size)


def _shape(config: FamilyConfig, outputs: int, slots: int, length: int, most_tokens: int, threads: int) -> ModelShape:
    return ModelShape(
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.intermediate_size,
        outputs,
        config.vocab_size,
        slots,
        length,
        most_tokens,
        threads,
        config.rms_norm_eps,
        config.head_dim**-0.5,
    )
