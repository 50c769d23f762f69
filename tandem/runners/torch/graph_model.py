"""Runs a model's steps as graphs, one per bucket, compiled at warm-up; a step copies to the device and back once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tandem.runners.eagle.graph_taps import tap
from tandem.runners.eagle.hidden_states import TargetFeatures
from tandem.runners.protocol import TAIL, ProposeRow
from tandem.runners.torch.buckets import Buckets
from tandem.runners.torch.draft_graphs import DraftGraphs
from tandem.runners.torch.graph_modules import PrefillModule, ProposeModule, VerifyModule
from tandem.runners.torch.graphs import GraphCompiler
from tandem.runners.torch.model import TorchModel
from tandem.runners.torch.runner import DraftedToken
from tandem.runners.torch.sampled_modules import LogitsModule, SampledProposeModule


class GraphModel(DraftGraphs, TorchModel):
    """TorchModel with graphs, compiled by `prepare`."""

    ids = torch.int32  # 64-bit integers are not native to every compiler's device

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "packed": False})
        self._graphs, self._buffers = {}, self.slots.buffers
        self._layers: tuple[int, ...] = ()

    @property
    def buffers(self) -> list[Tensor]:
        """The graphs' arguments: the slot cache, and features if handed out."""
        return self._buffers

    @property
    def hands_out(self) -> bool:
        return bool(self._layers)

    def hand_out(self, layers: Sequence[int]) -> TargetFeatures:
        """Later graphs also write the hidden states after `layers`."""
        features = self.new_features(layers)
        tap(self.module, layers)
        self._layers = tuple(layers)
        self._buffers = [*self.slots.buffers, features.values.flatten(0, 1)[None]]
        return features

    def traced(
        self, buffers: Sequence[Tensor], slots: Tensor, tokens: Tensor, starts: Tensor, length: int, head: bool = True
    ) -> Tensor:
        positions, cache = self._placed(buffers, slots, tokens, starts, length)
        out = self._run(tokens, positions, length, cache, head)
        if self._layers:
            cache.store(buffers[-1], self._layers)
        return out

    def prepare(self, compiler: GraphCompiler, buckets: Buckets, verifies: bool) -> None:
        """Compiles the graphs of a target (`verifies`) or a draft."""
        self.buckets = buckets
        self._verifies = verifies
        length = self.slots.length
        self._make(compiler, "prefill", PrefillModule(self, length), 1, buckets.chunk, 2 + buckets.chunk)
        for batch in buckets.batches:
            if verifies:
                self._make(compiler, "verify", VerifyModule(self, length), batch, buckets.width, 3 + buckets.width)
                continue
            for k in buckets.drafts:
                self._make(compiler, "propose", ProposeModule(self, length, k), batch, k, 3 + TAIL)
            if self.platform.only_graphs and buckets.drafts:
                self._prepare_sampled(compiler, batch)

    def _prepare_sampled(self, compiler: GraphCompiler, batch: int) -> None:
        length = self.slots.length
        for k in self.buckets.drafts:
            noise = self._noise([], batch, k)
            self._make(compiler, "sample", SampledProposeModule(self, length, k), batch, k, 3 + TAIL, noise)
        for width in (1, TAIL):
            self._make(compiler, "logits", LogitsModule(self, length), batch, width, 3 + width)

    @torch.no_grad()
    def forward(
        self,
        slots: Sequence[int],
        tokens: Tensor,
        starts: Tensor,
        length: int | None = None,
        head: bool = True,
        adapters: Sequence[int] = (),
    ) -> Tensor:
        """Like TorchModel.forward, with a draft's logits from module code; ignores `adapters`."""
        if head and not self._verifies:
            return super().forward(slots, tokens, starts, length, head)
        front = zip(slots, starts.tolist(), tokens.tolist(), strict=True)
        if not head:
            return self.prefilled([[slot, start, *fed] for slot, start, fed in front])
        return self.verified([[slot, start, 0, *fed] for slot, start, fed in front])[0]

    def verified(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Runs VerifyModule on packed rows; returns its results on the device."""
        rows = self.idle_rows(rows, self.buckets.batch(len(rows)), len(rows[0]))
        logits, results = self._graph("verify", len(rows), len(rows[0]) - 3)(self._buffers, self.tensor(rows))
        return logits, results

    def logits(self, rows: Sequence[ProposeRow], drafts: Sequence[Sequence[DraftedToken]]) -> Tensor:
        packed = [
            [row.slot, row.position + len(draft), 1, draft[-1].token]
            if draft
            else [row.slot, row.position + 1 - len(row.tail), len(row.tail), *row.tail]
            for row, draft in zip(rows, drafts, strict=True)
        ]
        width = 1 if max(map(len, packed)) == 4 else TAIL
        packed = [[*row, *row[-1:] * (3 + width - len(row))] for row in packed]
        packed = self.idle_rows(packed, self.buckets.batch(len(rows)), 3 + width)
        logits: Tensor = self._graph("logits", len(packed), width)(self._buffers, self.tensor(packed))
        return logits.cpu()[: len(rows)]
