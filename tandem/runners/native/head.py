"""Packs an EAGLE-3 head for the C++ step, which reads the features that its target's steps write."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.checkpoints.head_config import HeadConfig
from tandem.runners.eagle.features import TargetFeatures
from tandem.runners.eagle.module import EagleHead
from tandem.runners.native.library import HeadInputs, LayerWeights, ModelShape, Table
from tandem.runners.native.runner import NativeRunner
from tandem.runners.native.steps import DTYPES, NativeSteps, NotNative, Threads, check_rope, check_sizes
from tandem.runners.native.weights import Packing
from tandem.runners.protocol import VerifyRow
from tandem.speculation.types import Verdict


class NativeHead(NativeSteps):
    """The steps of a head, whose slots are its target's.

    The head's weights are copied; features and `embedding`, [vocabulary, hidden], are shared. They are in float32 or
    bfloat16, whatever the head computes in. `most_tokens`: tokens that one step may feed in total. `kept_states`: of so
    many last positions of a slot its own hidden states are kept; with 1 each step goes on after the one before.
    """

    def __init__(
        self,
        head: EagleHead,
        features: TargetFeatures,
        embedding: Tensor,
        threads: Threads,
        most_tokens: int,
        packing: Packing,
        kept_states: int = 1,
    ) -> None:
        check_head(head, features, embedding)
        slots, length, _ = features.values.shape
        sizes = _shape(head.config, int(slots), int(length), most_tokens, threads.count)
        tables, only = _rotary(head, int(length)), head.token_ids.tolist()
        super().__init__(threads, head.fc.weight.dtype, sizes, embedding, tables, head.config.vocab_size, only)
        self.packing, self.features, self._kept_states = packing, features, kept_states
        self._pack(head)

    def _pack(self, head: EagleHead) -> None:
        layer, values = head.midlayer, self.features.values
        fuse, _kept = self.packing.matrix(0, "fc", head.fc)
        embedded, read = _table(self.embedding), _table(values)
        norm, residual_normed = layer.hidden_norm.weight.data_ptr(), int(head.config.norm_before_residual)
        inputs = HeadInputs(embedded, read, values.shape[1], residual_normed, self._kept_states, norm, fuse)
        self.done(self.library.tandem_read_features(self.handle, ctypes.byref(inputs)))
        made = {name: self.packing.matrix(0, name, linear) for name, linear in linears(head).items()}
        norms = layer.input_layernorm.weight.data_ptr(), layer.post_attention_layernorm.weight.data_ptr()
        weights = LayerWeights(*norms, None, None, *(matrix for matrix, _ in made.values()))
        self.done(self.library.tandem_set_layer(self.handle, 0, ctypes.byref(weights)))
        output, _kept = self.packing.output(head.lm_head, None)
        self.done(self.library.tandem_set_head(self.handle, head.norm.weight.data_ptr(), ctypes.byref(output)))


class NativeHeadRunner(NativeRunner):
    """Runs a head as a draft. Its keys lie one position before their tokens, so that its pages would not be whole.

    A target's pages hold its features, from which a head's keys are soon made again.
    """

    @property
    def page_bytes(self) -> int:
        return 0

    @property
    def no_adapters(self) -> str:
        return "an EAGLE head takes none"

    def verify(self, rows: Sequence[VerifyRow]) -> list[Verdict | Any]:
        raise NotImplementedError("an EAGLE head drafts and verifies nothing")


def linears(head: EagleHead) -> dict[str, Any]:
    """The layer's linear modules, by their names in MATRICES and in that order."""
    attention, mlp = head.midlayer.self_attn, head.midlayer.mlp
    parts = {name: getattr(attention, f"{name}_proj") for name in "qkvo"}
    return parts | {name: getattr(mlp, f"{name}_proj") for name in ("gate", "up", "down")}


def check_head(head: EagleHead, features: TargetFeatures, embedding: Tensor) -> None:
    """Raises NotNative unless the C++ step computes what this head computes."""
    config = head.config
    for name, tensor in (("weights", head.fc.weight), ("features", features.values), ("embedding", embedding)):
        if tensor.dtype not in DTYPES or tensor.device.type != "cpu":
            raise NotNative(f"{name} in {str(tensor.dtype).removeprefix('torch.')} on {tensor.device.type}")
    check_sizes(config.hidden_size, config.head_dim, config.intermediate_size)
    check_sizes(config.target_hidden_size, config.head_dim, config.intermediate_size)
    check_rope(config.rope)
    if not all(tensor.is_contiguous() for tensor in (*head.parameters(), features.values, embedding)):
        raise NotNative("weights that are not contiguous")


def _shape(config: HeadConfig, slots: int, length: int, most_tokens: int, threads: int) -> ModelShape:
    return ModelShape(
        1,
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.intermediate_size,
        config.draft_vocab_size,
        slots,
        length,
        most_tokens,
        threads,
        config.rms_norm_eps,
        config.head_dim**-0.5,
    )


@torch.inference_mode()
def _rotary(head: EagleHead, length: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines, each float32 [length, head_dim / 2], rounded as the module rounds them."""
    cosines, sines = head.turns(torch.arange(length)[None])
    half = [table[0, :, : head.config.head_dim // 2].float().contiguous().numpy() for table in (cosines, sines)]
    return half[0], half[1]


def _table(rows: Tensor) -> Table:
    return Table(rows.data_ptr(), rows.shape[-1], int(rows.dtype == torch.float32))
