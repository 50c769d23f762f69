"""Packs the weights of a Llama-family transformers module for the C++ step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.runners.eagle.hidden_states import TargetFeatures
from tandem.runners.native.library import NORMS, LayerWeights, ModelShape, ints
from tandem.runners.native.steps import DTYPES, NativeSteps, NotNative, Threads, check_rope, check_sizes
from tandem.runners.native.weights import UNQUANTISED, Packing

FAMILY = ("llama", "mistral", "qwen2", "qwen3")


class NativeModel(NativeSteps):
    """The steps of one module, whose weights are copied, except the embedding, which is shared.

    `most_tokens`: tokens that one step may feed in total.
    """

    def __init__(
        self,
        module: Any,
        threads: Threads,
        slots: int,
        length: int,
        most_tokens: int,
        draft_vocab: Sequence[int] | None = None,
        packing: Packing = UNQUANTISED,
    ) -> None:
        check(module)
        config, dtype = module.config, next(module.parameters()).dtype
        outputs = module.get_output_embeddings().weight.shape[0] if draft_vocab is None else len(draft_vocab)
        sizes = _shape(module, outputs, slots, length, most_tokens, threads.count)
        embedding = module.get_input_embeddings().weight.detach()
        tables = _rotary(module, length, _head_dim(config))
        super().__init__(threads, dtype, sizes, embedding, tables, int(config.vocab_size), draft_vocab)
        self.packing, self._cache = packing, (slots, length)
        self._features: torch.Tensor | None = None
        self._pack(module, packing)

    def _pack(self, module: Any, packing: Packing) -> None:
        """Copies the weights; of the head, only the rows of `draft_vocab`."""
        for index, layer in enumerate(module.base_model.layers):
            weights, _kept = _weights(index, layer, packing)
            self.done(self.library.tandem_set_layer(self.handle, index, ctypes.byref(weights)))
        head, _kept = packing.output(
            module.get_output_embeddings(), None if self.draft_vocab is None else self.draft_vocab.tolist()
        )
        norm = module.base_model.norm.weight
        self.done(self.library.tandem_set_head(self.handle, norm.data_ptr(), ctypes.byref(head)))

    @property
    def hands_out(self) -> bool:
        """Whether `hand_out` was called."""
        return self._features is not None

    def hand_out(self, layers: Sequence[int]) -> TargetFeatures:
        """From now on, steps also write the hidden states after so many `layers` (tandem/runners/eagle)."""
        embedding = self.embedding
        self._features = torch.zeros(*self._cache, len(layers) * embedding.shape[1], dtype=self.dtype)
        self.library.tandem_hand_out(self.handle, ints(layers), len(layers), self._features.data_ptr())
        return TargetFeatures(self._features, embedding)


def check(module: Any) -> None:
    """Raises NotNative unless the C++ step computes what this module computes."""
    config, dtype = module.config, next(module.parameters()).dtype
    if config.model_type not in FAMILY:
        raise NotNative(f"models of type {config.model_type} (there are {', '.join(FAMILY)})")
    if dtype not in DTYPES:
        raise NotNative(f"weights in {str(dtype).removeprefix('torch.')} (there are float32 and bfloat16)")
    if config.hidden_act != "silu":
        raise NotNative(f"activation {config.hidden_act}")
    check_rope(getattr(config, "rope_parameters", None) or {})
    check_sizes(config.hidden_size, _head_dim(config), config.intermediate_size)


def _shape(module: Any, outputs: int, slots: int, length: int, most_tokens: int, threads: int) -> ModelShape:
    config = module.config
    dim = _head_dim(config)
    return ModelShape(
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads,
        _kv_heads(config),
        dim,
        config.intermediate_size,
        outputs,
        int(module.get_input_embeddings().weight.shape[0]),
        slots,
        length,
        most_tokens,
        threads,
        config.rms_norm_eps,
        dim**-0.5,
    )


def _kv_heads(config: Any) -> int:
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


@torch.inference_mode()
def _rotary(module: Any, length: int, dim: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines, each float32 [length, dim / 2], rounded as the module rounds them."""
    like = module.get_input_embeddings().weight[:1, :1]
    cosines, sines = module.base_model.rotary_emb(like, torch.arange(length)[None])
    half = [table[0, :, : dim // 2].float().contiguous().numpy() for table in (cosines, sines)]
    return half[0], half[1]


def _weights(index: int, layer: Any, packing: Packing) -> tuple[LayerWeights, object]:
    """What the library packs for a layer, and what keeps its memory."""
    attention, mlp = layer.self_attn, layer.mlp
    linears = {
        **{name: getattr(attention, f"{name}_proj") for name in "qkvo"},
        **{name: getattr(mlp, f"{name}_proj") for name in ("gate", "up", "down")},
    }
    norms: dict[str, Any] = {
        "attention_norm": layer.input_layernorm.weight,
        "mlp_norm": layer.post_attention_layernorm.weight,
        "q_norm": getattr(getattr(attention, "q_norm", None), "weight", None),
        "k_norm": getattr(getattr(attention, "k_norm", None), "weight", None),
    }
    for name, tensor in [*norms.items(), *((name, linear.weight) for name, linear in linears.items())]:
        if tensor is not None and not tensor.is_contiguous():
            raise NotNative(f"{name} is not contiguous")
    made = {name: packing.matrix(index, name, linear) for name, linear in linears.items()}
    addresses = {name: None if norms[name] is None else norms[name].data_ptr() for name in NORMS}
    return LayerWeights(**addresses, **{name: matrix for name, (matrix, _) in made.items()}), made
