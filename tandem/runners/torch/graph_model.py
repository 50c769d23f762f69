"""Runs the steps of a model, or of an EAGLE-3 head, as graphs, one per bucket, compiled at warm-up."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tandem.runners.eagle.hidden_states import TargetFeatures
from tandem.runners.protocol import TAIL, PrefillRow, Proposal, ProposeRow, RowFailed, StepShapes
from tandem.runners.torch.graph_modules import (
    LogitsModule,
    PrefillModule,
    ProposeModule,
    VerifyModule,
    padded,
    propose_row,
)
from tandem.runners.torch.graphs import Graph, GraphCompiler, GraphRefused
from tandem.runners.torch.platforms import Platform
from tandem.runners.torch.slot_model import TorchModel, to_host
from tandem.runners.torch.torch_runner import draft_rows


class DraftGraphs(ABC):
    """Graphs by purpose, rows, size; a step copies to the device and back once. `spare`: slot of idle rows."""

    prefix = ""  # of names for the compiler
    platform: Platform
    device: str
    spare: int
    buckets: StepShapes
    _graphs: dict[tuple[str, int, int], Graph]
    _buffers: list[Tensor]

    @abstractmethod
    def logits(self, rows: Sequence[ProposeRow], drafts: Sequence[Sequence[int]]) -> Tensor:
        """Logits [rows, columns] after the rows' tails and drafts, on the host."""

    @property
    def graph_names(self) -> list[str]:
        return [f"{name}-{batch}x{size}" for name, batch, size in self._graphs]

    def _make(
        self,
        compiler: GraphCompiler,
        name: str,
        step: nn.Module,
        batch: int,
        size: int,
        columns: int,
        more: Sequence[Tensor] = (),
    ) -> None:
        arguments: tuple[Any, ...] = (self._buffers, *more, self.tensor(self.idle_rows([], batch, columns)))
        self._graphs[name, batch, size] = compiler.graph(f"{self.prefix}{name}-{batch}x{size}", step, arguments)

    def _graph(self, name: str, batch: int, size: int) -> Graph:
        try:
            return self._graphs[name, batch, size]
        except KeyError:
            raise GraphRefused(f"no graph was made to {name} {batch} rows of {size} tokens") from None

    def tensor(self, values: Sequence[Sequence[int]] | Sequence[int]) -> Tensor:
        """int32 on the device: not every compiler has 64-bit integers."""
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def idle_rows(self, rows: list[list[int]], batch: int, columns: int) -> list[list[int]]:
        """Pads to `batch` rows with one token in the spare slot (the third column is a count)."""
        return rows + [[self.spare, 0, 1, *[0] * (columns - 3)]] * (batch - len(rows))

    def prefill(self, rows: Sequence[PrefillRow]) -> list[RowFailed | None]:
        for row in rows:
            self.prefilled([[row.slot, row.start, *padded(row.tokens, self.buckets.chunks[0])]])
        return [None] * len(rows)

    def prefilled(self, rows: list[list[int]]) -> Tensor:
        """Runs the prefill graph on rows [n, 2 + chunk]; returns positions [n], int32."""
        after: Tensor = self._graph("prefill", len(rows), len(rows[0]) - 2)(self._buffers, self.tensor(rows))
        return after

    def drafts(self, rows: Sequence[ProposeRow]) -> bool:
        """Whether graphs draft for these rows; else module code samples."""
        return any(row.k for row in rows) and (self.platform.only_graphs or all(row.plain for row in rows))

    @torch.no_grad()
    def propose(self, rows: Sequence[ProposeRow], vocab_size: int, ids: Tensor | None) -> list[Proposal | RowFailed]:
        """Like Runner.propose: one graph and one copy to the host, or one per token if the host draws."""
        if not all(row.plain for row in rows):
            return draft_rows(rows, lambda drafts: self.logits(rows, drafts), vocab_size, ids)
        began = time.perf_counter()
        drafts = to_host(self.proposed([propose_row(row) for row in rows], max(row.k for row in rows)))
        seconds = time.perf_counter() - began
        return [Proposal(tuple(own[: row.k]), seconds) for own, row in zip(drafts, rows, strict=False)]

    def proposed(self, rows: list[list[int]], k: int) -> Tensor:
        """Drafts greedily for packed rows; returns [batch, k or more], int32, on the device."""
        packed = self.tensor(self.idle_rows(rows, self.buckets.batch(len(rows)), 3 + TAIL))
        drafts: Tensor = self._graph("propose", len(packed), self.buckets.draft(k))(self._buffers, packed)
        return drafts


class GraphModel(DraftGraphs, TorchModel):
    """TorchModel with graphs, compiled by `prepare`."""

    ids = torch.int32  # 64-bit integers are not native to every compiler's device

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "packed": False})
        self._graphs, self._buffers = {}, self.slots.buffers

    @property
    def buffers(self) -> list[Tensor]:
        """The graphs' arguments: the slot cache, and features if handed out."""
        return self._buffers

    def hand_out(self, layers: Sequence[int]) -> TargetFeatures:
        """Later graphs also write the hidden states after `layers`."""
        features = super().hand_out(layers)
        self._buffers = [*self.slots.buffers, features.values.flatten(0, 1)[None]]
        return features

    def prepare(self, compiler: GraphCompiler, buckets: StepShapes, verifies: bool) -> None:
        """Compiles the graphs of a target (`verifies`) or a draft."""
        self.buckets, self._verifies = buckets, verifies
        self._make(compiler, "prefill", PrefillModule(self), 1, buckets.chunks[0], 2 + buckets.chunks[0])
        for batch in buckets.batches:
            if verifies:
                self._make(compiler, "verify", VerifyModule(self), batch, buckets.widths[0], 3 + buckets.widths[0])
                continue
            for k in buckets.drafts:
                self._make(compiler, "propose", ProposeModule(self, k), batch, k, 3 + TAIL)
            for width in (1, TAIL) if self.platform.only_graphs and buckets.drafts else ():
                self._make(compiler, "logits", LogitsModule(self), batch, width, 3 + width)

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

    def logits(self, rows: Sequence[ProposeRow], drafts: Sequence[Sequence[int]]) -> Tensor:
        packed = [
            [row.slot, row.position + len(draft), 1, draft[-1]]
            if draft
            else [row.slot, row.position + 1 - len(row.tail), len(row.tail), *row.tail]
            for row, draft in zip(rows, drafts, strict=True)
        ]
        width = 1 if max(map(len, packed)) == 4 else TAIL
        packed = [[*row, *row[-1:] * (3 + width - len(row))] for row in packed]
        packed = self.idle_rows(packed, self.buckets.batch(len(rows)), 3 + width)
        logits: Tensor = self._graph("logits", len(packed), width)(self._buffers, self.tensor(packed))
        return logits.cpu()[: len(rows)]
