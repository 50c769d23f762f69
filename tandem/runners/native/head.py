"""Packs an EAGLE-3 head for the C++ step, which reads features that its target's steps write."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from tandem.checkpoints.head_config import LINEARS, NORMS, HeadConfig
from tandem.checkpoints.head_weights import HeadWeights
from tandem.checkpoints.numbers import Stored, of_floats
from tandem.runners.capabilities import UNABLE, Capabilities, No, Trait
from tandem.runners.eagle.remote import RemoteHead
from tandem.runners.native.features import NativeFeatures
from tandem.runners.native.library import HeadInputs, LayerWeights, ModelShape, RowBatch, RowTable
from tandem.runners.native.rotary import rotary_tables
from tandem.runners.native.runner import NativeRunner
from tandem.runners.native.steps import DTYPES, NativeSteps, NotNative, Threads, check_rope, check_sizes
from tandem.runners.native.weights import Linear, Packing
from tandem.runners.protocol import Limits, PrefillRow, ProposeRow, RunnerIdentity, VerifyRow
from tandem.speculation.features import FeatureInbox


class NativeHead(NativeSteps):
    """A head's steps in `dtype`, in its target's slots. `kept_states`: positions with own states; 1: the last."""

    def __init__(
        self,
        head: HeadWeights,
        dtype: str,
        features: NativeFeatures,
        threads: Threads,
        most_tokens: int,
        packing: Packing,
        kept_states: int = 1,
    ) -> None:
        config, embedding = head.config, features.embedding
        check_head(config, dtype)
        slots, length, _ = features.values.shape
        sizes = _shape(config, len(embedding.values), int(slots), int(length), most_tokens, threads.count)
        tables = rotary_tables(config.rope, config.head_dim, int(length), dtype)
        super().__init__(threads, dtype, sizes, embedding, [tables], config.vocab_size, head.token_ids.tolist())
        self.packing, self.features, self._kept_states = packing, features, kept_states
        self._pack(head)

    @property
    def spare_bytes(self) -> int:
        """Bytes outside slots: its own states."""
        states = self._kept_states * int(self.sizes.slots * self.sizes.hidden) * (2 if self.dtype == "bfloat16" else 4)
        return super().spare_bytes + states

    def _pack(self, head: HeadWeights) -> None:
        values = self.features.stored
        norms = {name: head.weight(name, self.dtype) for name in NORMS}
        hidden, own, inner, last = (norms[name].values.ctypes.data for name in NORMS)
        fuse, _kept = self.packing.matrix(0, "fc", linear(head, "fc", self.dtype))
        embedded, read = _table(self.embedding), _table(values)
        residual_normed = int(head.config.norm_before_residual)
        inputs = HeadInputs(embedded, read, values.shape[1], residual_normed, self._kept_states, hidden, fuse)
        self.done(self.library.tandem_read_features(self.handle, ctypes.byref(inputs)))
        made = {
            name: self.packing.matrix(0, name, linear(head, module, self.dtype)) for name, module in LINEARS.items()
        }
        matrices = {name: matrix for name, (matrix, _) in made.items()}
        weights = LayerWeights(before_attention=own, before_mlp=inner, **matrices, **self.sight(0))
        self.done(self.library.tandem_set_layer(self.handle, 0, ctypes.byref(weights)))
        output, _kept = self.packing.output(linear(head, "lm_head", self.dtype), None)
        self.done(self.library.tandem_set_head(self.handle, last, ctypes.byref(output)))


class NativeHeadRunner(NativeRunner):
    """Runs a head as a draft. Its keys lie one position before their tokens, so it has no pages of its own."""

    def __init__(
        self, model: NativeHead, limits: Limits, identity: RunnerIdentity, away: RemoteHead | None = None
    ) -> None:
        super().__init__(model, limits, identity, verifies=False)
        self._reads = away.reads(self.follow) if away else UNABLE
        if away:
            model.own_features = model.features
        self._values = model.features.values
        self._dtype = "float32" if model.features.stored.dtype == "F32" else "bfloat16"
        self._inboxes: dict[int, FeatureInbox] = {}
        self._seen: dict[int, tuple[int, int]] = {}

    @property
    def capabilities(self) -> Capabilities:
        own = frozenset({Trait.HEAD})
        memory = self.memory_on_demand
        return Capabilities(own, features_in=self._reads, memory_on_demand=memory, reprocess_accepted=True)

    def verify(self, rows: Sequence[VerifyRow | PrefillRow]) -> list[Any]:
        raise NotImplementedError("an EAGLE head drafts and verifies nothing")

    def follow(self, slot: int, inbox: FeatureInbox) -> None:
        self._inboxes[slot] = inbox
        self._seen.pop(slot, None)

    def _batch(
        self, rows: Sequence[PrefillRow] | Sequence[ProposeRow], starts: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> RowBatch:
        # away from the target, positions count from the slot's first feature: rotary embeddings are relative
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
        inbox = self._inboxes.get(slot)
        if inbox is None:
            return 0, 0
        (first, end), values = inbox.seen, self._values[slot]
        behind = first - self._seen.get(slot, (first, end))[0]
        if behind:  # those before a gap go
            values[: len(values) - behind] = values[behind:].copy()
        for start, came in inbox.take():
            found = of_floats(came[max(0, first - start) :]).to(self._dtype).values
            at = max(0, start - first)
            values[at : at + len(found)] = found[: max(0, len(values) - at)]
        self._seen[slot] = first, end
        return first, end


def linear(head: HeadWeights, module: str, dtype: str) -> Linear:
    return Linear(head.shape(module), lambda: head.weight(module, dtype), head.bias(module, dtype))


def check_head(config: HeadConfig, dtype: str) -> None:
    """Raises NotNative unless the C++ step computes this head."""
    if dtype not in DTYPES:
        raise NotNative(f"weights in {dtype} (there are float32 and bfloat16)")
    check_sizes(config.hidden_size, config.head_dim, config.intermediate_size)
    check_sizes(config.target_hidden_size, config.head_dim, config.intermediate_size)
    check_rope(config.rope)


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


def _table(rows: Stored) -> RowTable:
    return RowTable(rows.values.ctypes.data, rows.shape[-1], int(rows.dtype == "F32"))
