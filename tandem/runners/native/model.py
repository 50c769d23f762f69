"""Packs the weights of a Llama-family transformers module for the C++ step."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import c_double, c_float, c_void_p
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.runners.eagle.features import TargetFeatures
from tandem.runners.native.library import (
    NORMS,
    Ints,
    LayerWeights,
    ModelShape,
    RowBatch,
    ints,
    pointer,
    zeros,
)
from tandem.runners.native.weights import UNQUANTISED, Packing
from tandem.speculation.draws import best_token
from tandem.speculation.logprobs import Logits, reported
from tandem.speculation.processing import Mask
from tandem.speculation.types import TokenLogprobs

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_FAILED = {
    1: "memory: the packed weights do not fit",
    2: "the rows of one panel (of q, k and v, or of gate and up) are stored in different formats",
}
STATIC_ROPE = ("default", "linear", "llama3", "yarn")


class NotNative(ValueError):
    """The C++ step cannot compute this model; the message says why."""


class Threads:
    """The thread pool shared by the models of one device thread."""

    def __init__(self, library: Any, count: int) -> None:
        self.library, self.count = library, count
        self.handle = library.tandem_pool(count)
        if not self.handle:
            raise NotNative(f"threads: {count} cannot be started")
        weakref.finalize(self, library.tandem_pool_free, self.handle)


class NativeModel:
    """Runs rows of tokens at positions of slots; returns the best tokens, or float32 logits [.., vocabulary].

    Methods that TorchModel has too behave the same. The module's weights are copied, except the embedding, which is
    shared. `most_tokens`: tokens that one step may feed in total.
    """

    def __init__(
        self,
        module: Any,
        threads: Threads,
        slots: int,
        length: int,
        most_tokens: int,
        only: Sequence[int] | None = None,
        packing: Packing = UNQUANTISED,
    ) -> None:
        check(module)
        config, self.dtype = module.config, next(module.parameters()).dtype
        self.device, self.vocab_size, self.threads = "cpu", int(config.vocab_size), threads
        self.only: NDArray[np.int32] | None = None if only is None else np.array(only, dtype=np.int32)
        self.stands_for: Ints | None = None if only is None else ints(only)
        self.most_tokens, self.layer_count = most_tokens, int(config.num_hidden_layers)
        self._cache = slots, length
        self._features: torch.Tensor | None = None
        self.library = threads.library
        self.outputs = module.get_output_embeddings().weight.shape[0] if only is None else len(only)
        self._scratch = np.empty((0, self.outputs), dtype=np.float32)
        self._wide = np.empty((0, self.vocab_size), dtype=np.float32)
        cosines, sines = _rotary(module, length, _head_dim(config))
        self._kept = module.get_input_embeddings().weight.detach(), cosines, sines
        shape = _shape(config, self.outputs, slots, length, most_tokens, threads.count)
        self.sizes = shape
        self.handle = self.library.tandem_model(
            threads.handle,
            DTYPES[self.dtype],
            ctypes.byref(shape),
            self._kept[0].data_ptr(),
            pointer(cosines, c_float),
            pointer(sines, c_float),
        )
        if not self.handle:
            raise NotNative("memory: the KV slots do not fit")
        weakref.finalize(self, self.library.tandem_model_free, self.handle)
        self._pack(module, packing)

    def _pack(self, module: Any, packing: Packing) -> None:
        """Copies the weights; of the head, only the rows of `only`."""
        for index, layer in enumerate(module.base_model.layers):
            weights, _kept = _weights(index, layer, packing)
            self._done(self.library.tandem_set_layer(self.handle, index, ctypes.byref(weights)))
        head, _kept = packing.output(module.get_output_embeddings(), None if self.only is None else self.only.tolist())
        norm = module.base_model.norm.weight
        self._done(self.library.tandem_set_head(self.handle, norm.data_ptr(), ctypes.byref(head)))

    @property
    def hands_out(self) -> bool:
        """Whether `hand_out` was called."""
        return self._features is not None

    def hand_out(self, layers: Sequence[int]) -> TargetFeatures:
        """From now on, steps also write the hidden states after so many `layers` (tandem/runners/eagle)."""
        embedding = self._kept[0]
        self._features = torch.zeros(*self._cache, len(layers) * embedding.shape[1], dtype=self.dtype)
        self.library.tandem_hand_out(self.handle, ints(layers), len(layers), self._features.data_ptr())
        return TargetFeatures(self._features, embedding)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all packed matrices, which every step reads."""
        return int(self.library.tandem_weight_bytes(self.handle))

    def slot_bytes(self, positions: int) -> int:
        """Bytes of the pages that the first `positions` of a slot take once they are written."""
        return int(self.library.tandem_slot_bytes(self.handle, min(positions, self.sizes.length)))

    def give_back(self, slot: int, positions: int = 0) -> None:
        """Gives back the memory of a slot behind the pages of its first `positions`."""
        self.library.tandem_give_back(self.handle, slot, positions)

    def feed(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        tokens: Sequence[Sequence[int]],
        wants: int = 2,
        adapters: Sequence[int] = (),
    ) -> NDArray[np.float32] | None:
        """Feeds rows of any lengths. Returns float32 logits [n, outputs].

        `wants`: 2 for the logits of all tokens, 1 for each row's last token, 0 for none (returns None). `adapters`: the
        numbers of the rows' adapters, 0 for none. Raises ValueError if there are more than `most_tokens` tokens.
        """
        batch = RowBatch(slots, starts, tokens, adapters)
        count = (0, len(tokens), int(batch.begins[-1]))[wants]
        if int(batch.begins[-1]) > self.most_tokens:
            raise ValueError(f"a step of {int(batch.begins[-1])} tokens is above {self.most_tokens}")
        logits = np.empty((count, self.outputs), dtype=np.float32) if count else None
        self.library.tandem_feed(self.handle, ctypes.byref(batch.rows), wants, pointer(logits, c_float))
        return logits

    def product(self, layer: int, which: int, x: Tensor, outputs: int) -> Tensor:
        """A packed matrix times x [tokens, inputs], in the model's dtype: float32 [tokens, outputs].

        `which` matrix of a layer: 0 q, k and v, 1 o, 2 gate and up, 3 down; the head for layer -1.
        """
        tokens, lanes = len(x), 32
        made = torch.empty(tokens, -(-outputs // lanes) * lanes)
        self.library.tandem_product(self.handle, layer, which, x.data_ptr(), tokens, made.data_ptr())
        return made[:, :outputs]

    def room(self, rows: int) -> NDArray[np.float32]:
        """Memory for logits [rows, outputs]. The next call gets the same, which saves the time of a new megabyte."""
        if len(self._scratch) < rows:
            self._scratch = np.empty((rows, self.outputs), dtype=np.float32)
        return self._scratch[:rows]

    def forward(
        self, slots: Sequence[int], tokens: Tensor, starts: Tensor, length: int | None = None, head: bool = True
    ) -> Tensor:
        """Logits [rows, width, vocabulary] of tokens [rows, width] at starts [rows]; `length` has no effect."""
        rows, width = tokens.shape
        logits = self.feed(slots, starts.tolist(), tokens.tolist(), 2 if head else 0)
        return torch.empty(0) if logits is None else torch.from_numpy(logits).view(rows, width, -1)

    def logprobs(self, logits: Sequence[Logits], tokens: Sequence[int], top: int) -> tuple[TokenLogprobs, ...]:
        """Like tandem.speculation.logprobs.all_logprobs, in a tenth of its time; the last bits may differ."""
        rows = [np.ascontiguousarray(row) for row in logits]
        top, totals = min(top, len(rows[0])), (c_double * len(rows))()
        ids = zeros(len(rows) * top)
        addresses = (c_void_p * len(rows))(*(row.ctypes.data for row in rows))
        self.library.tandem_logprobs(self.threads.handle, addresses, len(rows), len(rows[0]), top, totals, ids)
        return tuple(
            reported(row, token, ids[r * top : (r + 1) * top], totals[r])
            for r, (row, token) in enumerate(zip(rows, tokens, strict=True))
        )

    def best_within(self, logits: Logits, mask: Mask) -> int:
        """The token of `mask`, bool [vocabulary], with the largest logit, float32 [outputs]; -1 if there is none."""
        if len(mask) < self.vocab_size:
            mask = np.concatenate([mask, np.zeros(self.vocab_size - len(mask), dtype=np.bool_)])
        allowed = mask[: self.vocab_size] if self.only is None else mask[self.only]
        best = best_token(np.where(allowed, logits, np.float32(-np.inf)))
        return best if best < 0 or self.stands_for is None else self.stands_for[best]

    def widened(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits [rows, vocabulary] from logits [rows, outputs]; -inf for tokens that the head lacks.

        The next call may overwrite them.
        """
        if self.only is None:
            return logits
        if len(self._wide) < len(logits):
            self._wide = np.full((len(logits), self.vocab_size), -np.inf, dtype=np.float32)
        wide = self._wide[: len(logits)]
        wide[:, self.only] = logits
        return wide

    def tensor(self, values: Sequence[Sequence[int]] | Sequence[int]) -> Tensor:
        """The values as int64: [n] or [n, m]."""
        return torch.tensor(values, dtype=torch.int64)

    def _done(self, failed: int) -> None:
        if failed:
            raise NotNative(_FAILED[failed])


def check(module: Any) -> None:
    """Raises NotNative unless the C++ step computes what this module computes."""
    config, dtype = module.config, next(module.parameters()).dtype
    if config.model_type not in FAMILY:
        raise NotNative(f"models of type {config.model_type} (there are {', '.join(FAMILY)})")
    if dtype not in DTYPES:
        raise NotNative(f"weights in {str(dtype).removeprefix('torch.')} (there are float32 and bfloat16)")
    if config.hidden_act != "silu":
        raise NotNative(f"activation {config.hidden_act}")
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in STATIC_ROPE or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise NotNative(f"rotary embedding of type {kind}")
    for name, value, multiple in (
        ("hidden_size", config.hidden_size, 16),
        ("head_dim", _head_dim(config), 16),
        ("intermediate_size", config.intermediate_size, 2),
    ):
        if value % multiple:
            raise NotNative(f"{name} {value} (only multiples of {multiple})")


def _shape(config: Any, outputs: int, slots: int, length: int, most_tokens: int, threads: int) -> ModelShape:
    dim = _head_dim(config)
    return ModelShape(
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads,
        _kv_heads(config),
        dim,
        config.intermediate_size,
        outputs,
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
