"""Runs and drafts with compiled graphs of a model or an EAGLE-3 head."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tandem.runners.protocol import TAIL, PrefillRow, Proposal, ProposeRow, RowFailed
from tandem.runners.torch.buckets import Buckets
from tandem.runners.torch.graph_modules import padded, propose_row
from tandem.runners.torch.graphs import Graph, GraphCompiler, GraphRefused
from tandem.runners.torch.model import to_host
from tandem.runners.torch.platforms import Platform
from tandem.runners.torch.runner import DraftedToken, DraftVocabulary, draft_each, proposal_of
from tandem.runners.torch.sampled_modules import noise_of, warping_of
from tandem.speculation.types import SamplingParams


class DraftGraphs(ABC):
    """Graphs by purpose, rows, size. `spare`: slot of idle rows. `draft_vocab`: tokens of logits columns; None: all."""

    prefix = ""  # of names for the compiler
    platform: Platform
    device: str
    spare: int
    vocab_size: int
    draft_vocab: Tensor | None
    buckets: Buckets
    _graphs: dict[tuple[str, int, int], Graph]
    _buffers: list[Tensor]

    @abstractmethod
    def logits(self, rows: Sequence[ProposeRow], drafts: Sequence[Sequence[DraftedToken]]) -> Tensor:
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
            self.prefilled([[row.slot, row.start, *padded(row.tokens, self.buckets.chunk)]])
        return [None] * len(rows)

    def prefilled(self, rows: list[list[int]]) -> Tensor:
        """Runs the prefill graph on rows [n, 2 + chunk]; returns positions [n], int32."""
        after: Tensor = self._graph("prefill", len(rows), len(rows[0]) - 2)(self._buffers, self.tensor(rows))
        return after

    def drafts(self, rows: Sequence[ProposeRow]) -> bool:
        """Whether graphs draft for these rows; else module code samples."""
        return any(row.k for row in rows) and (self.platform.only_graphs or all(row.plain for row in rows))

    @torch.no_grad()
    def propose(self, rows: Sequence[ProposeRow], vocabulary: DraftVocabulary) -> list[Proposal | RowFailed]:
        """Like Runner.propose: one graph and one copy to the host, or one per token if the host needs the logits."""
        began, k = time.perf_counter(), max(row.k for row in rows)
        drafts: list[list[DraftedToken]] = [[] for _ in rows]
        if any(row.processor or row.request.drafts_sample for row in rows):
            for _ in range(k):
                drafted = draft_each(vocabulary, rows, self.logits(rows, drafts), drafts)
                drafts = [[*draft, one] for draft, one in zip(drafts, drafted, strict=True)]
        else:
            greedy = all(row.plain for row in rows)
            ids = self.proposed([propose_row(row) for row in rows], k) if greedy else self.sampled(rows, k)
            drafts = [[DraftedToken(token) for token in own] for own in to_host(ids)[: len(rows)]]
        seconds = time.perf_counter() - began
        return [proposal_of(draft[: row.k], seconds) for draft, row in zip(drafts, rows, strict=True)]

    def proposed(self, rows: list[list[int]], k: int) -> Tensor:
        """Drafts greedily for packed rows; returns [batch, k or more], int32, on the device."""
        packed = self.tensor(self.idle_rows(rows, self.buckets.batch(len(rows)), 3 + TAIL))
        drafts: Tensor = self._graph("propose", len(packed), self.buckets.draft(k))(self._buffers, packed)
        return drafts

    def sampled(self, rows: Sequence[ProposeRow], k: int) -> Tensor:
        """Drafts with given noise; returns [batch, k or more], int32, on the device."""
        batch, bucket = self.buckets.batch(len(rows)), self.buckets.draft(k)
        packed = self.tensor(self.idle_rows([propose_row(row) for row in rows], batch, 3 + TAIL))
        drafts: Tensor = self._graph("sample", batch, bucket)(self._buffers, *self._noise(rows, batch, bucket), packed)
        return drafts

    def _noise(self, rows: Sequence[ProposeRow], batch: int, k: int) -> tuple[Tensor, Tensor]:
        """Noise [batch, k, columns] and warping [batch, WARPING], float32."""
        kept = None if self.draft_vocab is None else self.draft_vocab.cpu().numpy()
        greedy = [warping_of(SamplingParams())] * (batch - len(rows))
        warping = torch.tensor([*(warping_of(row.request.sampling) for row in rows), *greedy])
        noise = torch.from_numpy(noise_of(rows, batch, k, self.vocab_size, kept))
        return noise.to(self.device), warping.to(self.device)
