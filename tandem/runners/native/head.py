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
from tandem.runners.capabilities import UNABLE, Capabilities, No, Trait
from tandem.runners.eagle.hidden_states import TargetFeatures
from tandem.runners.eagle.module import EagleHead
from tandem.runners.eagle.remote import RemoteHead
from tandem.runners.native.library import HeadInputs, LayerWeights, ModelShape, RowBatch, RowTable
from tandem.runners.native.runner import NativeRunner
from tandem.runners.native.steps import DTYPES, NativeSteps, NotNative, Threads, check_rope, check_sizes
from tandem.runners.native.weights import Packing
from tandem.runners.protocol import Limits, PrefillRow, ProposeRow, RunnerIdentity, VerifyRow
from tandem.speculation.features import FeatureInbox
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
        sizes = _shape(head.config, len(embedding), int(slots), int(length), most_tokens, threads.count)
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

    A target's pages hold its features, from which a head's keys are soon made again. `away`: what a head is made from
    whose target is elsewhere: features come by inbox, and its own states, which the model keeps of whole slots, take
    the place of others.
    """

    def __init__(
        self, model: NativeHead, limits: Limits, identity: RunnerIdentity, away: RemoteHead | None = None
    ) -> None:
        super().__init__(model, limits, identity, verifies=False)
        self._reads = away.reads(self.follow) if away else UNABLE
        self._values = model.features.values
        self._inboxes: dict[int, FeatureInbox] = {}
        self._seen: dict[int, tuple[int, int]] = {}

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(frozenset({Trait.HEAD}), features_in=self._reads, reprocess_accepted=True)

    def verify(self, rows: Sequence[VerifyRow]) -> list[Verdict | Any]:
        raise NotImplementedError("an EAGLE head drafts and verifies nothing")

    def follow(self, slot: int, inbox: FeatureInbox) -> None:
        """Like FeaturesIn.follow."""
        self._inboxes[slot] = inbox
        self._seen.pop(slot, None)

    def _batch(
        self, rows: Sequence[PrefillRow] | Sequence[ProposeRow], starts: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> RowBatch:
        """Like NativeRunner._batch; away from the target, positions count from that of a slot's first feature.

        The head sees nothing before it, and its rotary embedding is of distances alone.
        """
        if isinstance(self._reads, No):
            return super()._batch(rows, starts, tokens)
        slots = [row.slot for row in rows]
        seen = [self._take(slot) for slot in slots]
        begins = [
            min(max(first - start, 0), len(fed) - 1)
            for (first, _), start, fed in zip(seen, starts, tokens, strict=True)
        ]
        own = [max(start - first, 0) for (first, _), start in zip(seen, starts, strict=True)]
        fed = [each[begin:] for each, begin in zip(tokens, begins, strict=True)]
        return RowBatch(slots, own, fed, feature_counts=[end - first for first, end in seen])

    def _take(self, slot: int) -> tuple[int, int]:
        """Stores the features that have come for a slot; returns from where to where the next step reads them."""
        inbox = self._inboxes.get(slot)
        if inbox is None:
            return 0, 0
        (first, end), values = inbox.seen, self._values[slot]
        behind = first - self._seen.get(slot, (first, end))[0]
        if behind:  # those before a gap go
            values[: len(values) - behind] = values[behind:].clone()
        for start, came in inbox.take():
            found = torch.from_numpy(came[max(0, first - start) :])
            at = max(0, start - first)
            values[at : at + len(found)] = found[: max(0, len(values) - at)]
        self._seen[slot] = first, end
        return first, end


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


def _shape(config: HeadConfig, vocabulary: int, slots: int, length: int, most_tokens: int, threads: int) -> ModelShape:
    return ModelShape(
        1,
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.intermediate_size,
        config.draft_vocab_size,
        vocabulary,
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


def _table(rows: Tensor) -> RowTable:
    return RowTable(rows.data_ptr(), rows.shape[-1], int(rows.dtype == torch.float32))
