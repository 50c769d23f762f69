"""EAGLE-3 heads in C++, which read features that their target's steps write, here or elsewhere."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tandem.checkpoints.head_config import LINEARS, NORMS, HeadWeights
from tandem.checkpoints.numbers import DTYPES as NAMES
from tandem.checkpoints.numbers import Stored, of_floats
from tandem.host.cores import default_threads
from tandem.runners.capabilities import UNABLE, Capabilities, No, Trait
from tandem.runners.load_runner import SMALL
from tandem.runners.native.compilation import library_path
from tandem.runners.native.library import HeadInputs, LayerWeights, Matrix, RowBatch, StoredRows, load_library
from tandem.runners.native.native_runner import NativeRunner, most_tokens
from tandem.runners.native.packed_model import NativeModel
from tandem.runners.native.rotary import rotary_tables
from tandem.runners.native.steps import NativeFeatures, NativeSteps, Threads, check_steps, features_of
from tandem.runners.native.weights import UNQUANTISED, Packing, packing
from tandem.runners.protocol import Limits, PrefillRow, ProposeRow, RunnerIdentity, VerifyRow
from tandem.speculation.features import FeatureInbox

if TYPE_CHECKING:
    from tandem.runners.eagle.load_head import RemoteHead
    from tandem.runners.load_runner import Execution


def load_native_head(
    head: HeadWeights,
    features: NativeFeatures,
    embedding: Stored,
    target: NativeRunner,
    execution: Execution,
    identity: RunnerIdentity,
) -> NativeHeadRunner:
    """Packs the head of a target beside it. Raises NativeUnavailable."""
    in_blocks = isinstance(target.model, NativeModel) and target.model.packing.quantises
    dtype, packed = head_format(execution, in_blocks)
    limits = target.limits
    read = replace(features, embedding=embedding)
    model = NativeHead(head, dtype, read, target.model.threads, most_tokens(limits), packed)
    return NativeHeadRunner(model, limits, replace(identity, dtype=packed.describe(dtype), backend="native"))


def load_remote_native_head(made: RemoteHead, execution: Execution, in_blocks: bool) -> NativeHeadRunner:
    """Packs the head of a target elsewhere, which is `in_blocks` or not. Raises NativeUnavailable."""
    dtype, packed = head_format(execution, in_blocks)
    small, limits = made.head.parameters < SMALL, made.limits
    threads = Threads(load_library(library_path()), 1 if small else execution.threads or default_threads())
    embedding = made.embedding.to("bfloat16" if made.embedding.dtype == "BF16" else "float32")
    features = features_of(made.features_shape, NAMES[dtype], embedding.own())
    model = NativeHead(made.head, dtype, features, threads, most_tokens(limits), packed, made.length)
    identity = replace(made.identity, dtype=packed.describe(dtype), backend="native")
    return NativeHeadRunner(model, limits, identity, made)


def head_format(execution: Execution, in_blocks: bool) -> tuple[str, Packing]:
    """A head's dtype and packing: by flags, else int8 if the target is in blocks, else the fastest dtype here."""
    from tandem.runners.load_runner import dtype_name

    weights, dtype = execution.weights, execution.number_format
    if weights not in ("int8", "q4") and (dtype != "auto" or not in_blocks):
        return dtype_name(dtype, "cpu"), UNQUANTISED
    packed = packing(weights if weights in ("int8", "q4") else "int8")
    return dtype_name("float32" if dtype == "auto" else dtype, "cpu"), packed


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
        for hidden in (config.hidden_size, config.target_hidden_size):
            sizes = {"hidden_size": hidden, "head_dim": config.head_dim}
            check_steps(dtype, [config.rope], **sizes, intermediate_size=config.intermediate_size)
        slots, length, _ = features.values.shape
        tables, cache = rotary_tables(config.rope, config.head_dim, length, dtype), (slots, length, most_tokens)
        vocab, short = head.token_ids.tolist(), packing.quantises
        super().__init__(threads, dtype, config, 1, cache, embedding, [tables], vocab, short_cache=short)
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
        fuse, _kept = self._matrix(head, "fc", "fc")
        embedded, read = _table(self.embedding), _table(values)
        residual_normed = int(head.config.norm_before_residual)
        inputs = HeadInputs(embedded, read, values.shape[1], residual_normed, self._kept_states, hidden, fuse)
        self.done(self.library.tandem_read_features(self.handle, ctypes.byref(inputs)))
        made = {name: self._matrix(head, name, module) for name, module in LINEARS.items()}
        matrices = {name: matrix for name, (matrix, _) in made.items()}
        weights = LayerWeights(before_attention=own, before_mlp=inner, **matrices, **self.sight(0))
        self.done(self.library.tandem_set_layer(self.handle, 0, ctypes.byref(weights)))
        shape, output = head.shape("lm_head"), functools.partial(head.weight, "lm_head", self.dtype)
        packed, _kept = self.packing.output(self.library, shape, output, None)
        self.done(self.library.tandem_set_head(self.handle, last, ctypes.byref(packed)))

    def _matrix(self, head: HeadWeights, name: str, module: str) -> tuple[Matrix, object]:
        """The matrix, and the owner of its memory."""
        weight, bias = functools.partial(head.weight, module, self.dtype), head.bias(module, self.dtype)
        return self.packing.matrix(self.library, 0, name, head.shape(module), weight, bias)


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
        return Capabilities(
            own, features_in=self._reads, memory_on_demand=memory, reprocess_accepted=True, shared_steps=True
        )

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


def _table(rows: Stored) -> StoredRows:
    return StoredRows(rows.values.ctypes.data, rows.shape[-1], int(rows.dtype == "F32"))
