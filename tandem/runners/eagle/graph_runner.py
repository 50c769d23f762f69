"""Runs an EAGLE-3 head as graphs, next to a target whose graphs write the features that it reads.

A greedy draft is one graph and one copy to the host. Sampled drafts are module code, except on platforms where only
graphs may run: there a graph draws them from given noise, or the host draws them from one graph per token, as for a
draft model (tandem/runners/torch/graph_runner.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tandem.runners.eagle.graph_modules import (
    HeadFirst,
    HeadNext,
    HeadPrefill,
    HeadPropose,
    HeadSample,
    HeadStep,
    SlotLengths,
)
from tandem.runners.eagle.hidden_states import TargetFeatures
from tandem.runners.eagle.module import EagleHead
from tandem.runners.eagle.runner import EagleRunner
from tandem.runners.protocol import (
    TAIL,
    Limits,
    PrefillRow,
    Proposal,
    ProposeRow,
    RowFailed,
    RunnerIdentity,
    StepShapes,
)
from tandem.runners.startup import Startup
from tandem.runners.torch.graph_modules import padded, propose_row
from tandem.runners.torch.graph_runner import GraphRunner
from tandem.runners.torch.graphs import CompileStatistics, Graph
from tandem.runners.torch.model import to_host
from tandem.runners.torch.platforms import Platform
from tandem.runners.torch.runner import DraftedToken, draft_each, proposal_of, tail_buckets
from tandem.runners.torch.sampled_modules import noise_of, warping_of
from tandem.speculation.types import SamplingParams


class EagleGraphRunner(EagleRunner):
    """Compiles a head's steps for the buckets of `target`, with its compiler."""

    def __init__(
        self,
        head: EagleHead,
        features: TargetFeatures,
        embedding: Tensor,
        limits: Limits,
        identity: RunnerIdentity,
        platform: Platform,
        target: GraphRunner,
    ) -> None:
        super().__init__(head, features, embedding, limits, identity, platform)
        self.buckets = target.buckets
        self._compiler = target.compiler_for(f"head {identity.weights_revision} on {target.identity.weights_revision}")
        self._buffers = [*self.slots.buffers, features.values.flatten(0, 1)[None], embedding]
        self._columns = torch.arange(self.slots.length, dtype=torch.int32, device=platform.device)
        self._lengths = SlotLengths(self.slots.length, features.values.shape[1])
        self._host_ids = self.token_ids.cpu()
        self._graphs: dict[tuple[str, int, int], Graph] = {}
        self.shapes = StepShapes(tail_buckets(), self.buckets.batches, False, chunks=(limits.chunk,))

    @property
    def graph_names(self) -> list[str]:
        """Names of the graphs, such as propose-2x4."""
        return [f"{name}-{batch}x{size}" for name, batch, size in self._graphs]

    def warm_up(self, startup: Startup | None = None) -> None:
        startup = startup or Startup()
        self.compile(startup)
        with startup.stage("warming"):
            for batch in self.buckets.batches if self.buckets.drafts else ():
                rows = self._rows([], batch, 3 + TAIL)
                to_host(self._graphs["propose", batch, self.buckets.drafts[-1]](self._buffers, rows))

    def compile(self, startup: Startup) -> CompileStatistics:
        """Compiles every graph of the head, without drafting, and seals the compiler."""
        with startup.stage("compiling"):
            shape = self.head, self._lengths, self._columns
            self._make("prefill", HeadPrefill(*shape), 1, self.limits.chunk, 2 + self.limits.chunk)
            for batch in self.buckets.batches:
                for k in self.buckets.drafts:
                    self._make("propose", HeadPropose(*shape, k), batch, k, 3 + TAIL)
                if self.platform.only_graphs and self.buckets.drafts:
                    self._make_sampled(batch)
            self._compiler.seal()
        startup.note(f"graphs of {self.identity.model_name}: {self._compiler.statistics.line()}")
        return self._compiler.statistics

    def _make_sampled(self, batch: int) -> None:
        shape = self.head, self._lengths, self._columns
        for k in self.buckets.drafts:
            self._make("sample", HeadSample(*shape, k), batch, k, 3 + TAIL, self._noise([], batch, k))
        self._make("first", HeadFirst(*shape), batch, TAIL, 3 + TAIL)
        states = torch.zeros(batch, self.head.config.hidden_size, dtype=self._dtype, device=self.platform.device)
        self._make("next", HeadNext(*shape), batch, 1, 4, (states,))

    def _make(
        self, name: str, step: HeadStep, batch: int, size: int, columns: int, more: Sequence[Tensor] = ()
    ) -> None:
        arguments: tuple[Any, ...] = (self._buffers, *more, self._rows([], batch, columns))
        self._graphs[name, batch, size] = self._compiler.graph(f"head-{name}-{batch}x{size}", step, arguments)

    @torch.no_grad()
    def prefill(self, rows: Sequence[PrefillRow]) -> list[RowFailed | None]:
        size = self.limits.chunk
        for row in rows:
            packed = self._rows([[row.slot, row.start, *padded(row.tokens, size)]], 1, 2 + size)
            self._graphs["prefill", 1, size](self._buffers, packed)
        return [None] * len(rows)

    @torch.no_grad()
    def propose(self, rows: Sequence[ProposeRow]) -> list[Proposal | RowFailed]:
        k = max(row.k for row in rows)
        greedy = all(row.plain for row in rows)
        if not k or not (greedy or self.platform.only_graphs):
            return super().propose(rows)
        began = time.perf_counter()
        if any(row.processor or row.request.drafts_sample for row in rows):
            return self._propose_by_logits(rows, k)
        batch, bucket = self.buckets.batch(len(rows)), self.buckets.draft(k)
        packed = self._rows([propose_row(row) for row in rows], batch, 3 + TAIL)
        if greedy:
            drafts = to_host(self._graphs["propose", batch, bucket](self._buffers, packed))
        else:
            noise = self._noise(rows, batch, bucket)
            drafts = to_host(self._graphs["sample", batch, bucket](self._buffers, *noise, packed))
        seconds = time.perf_counter() - began
        return [Proposal(tuple(d[: row.k]), seconds) for row, d in zip(rows, drafts, strict=False)]

    def _propose_by_logits(self, rows: Sequence[ProposeRow], k: int) -> list[Proposal | RowFailed]:
        """Drafts with one graph and one copy to the host per token; the head's states stay on the device."""
        began, batch = time.perf_counter(), self.buckets.batch(len(rows))
        packed = self._rows([propose_row(row) for row in rows], batch, 3 + TAIL)
        logits, states = self._graphs["first", batch, TAIL](self._buffers, packed)
        drafts: list[list[DraftedToken]] = [[] for _ in rows]
        for i in range(k):
            if i:
                fed = zip(rows, drafts, strict=True)
                packed = self._rows([[row.slot, row.position + i, 1, draft[-1].token] for row, draft in fed], batch, 4)
                logits, states = self._graphs["next", batch, 1](self._buffers, states, packed)
            host = logits.cpu()[: len(rows)]
            for draft, drafted in zip(drafts, draft_each(self, rows, host, drafts), strict=True):
                draft.append(drafted)
        seconds = time.perf_counter() - began
        return [proposal_of(draft[: row.k], seconds) for draft, row in zip(drafts, rows, strict=True)]

    def tokens_of(self, columns: Tensor) -> Tensor:
        return self._ids_at(columns)[columns]

    def widened(self, logits: Tensor) -> Tensor:
        full = torch.full((*logits.shape[:-1], self.vocab_size), -torch.inf, device=logits.device)
        return full.index_copy_(-1, self._ids_at(logits), logits.float())

    def _ids_at(self, values: Tensor) -> Tensor:
        return self._host_ids if values.device.type == "cpu" else self.token_ids

    @property
    def _dtype(self) -> torch.dtype:
        return self.head.fc.weight.dtype

    def _noise(self, rows: Sequence[ProposeRow], batch: int, k: int) -> tuple[Tensor, Tensor]:
        """HeadSample's noise [batch, k, columns] and warping [batch, WARPING], float32."""
        greedy = [warping_of(SamplingParams())] * (batch - len(rows))
        warping = torch.tensor([*(warping_of(row.request.sampling) for row in rows), *greedy])
        noise = torch.from_numpy(noise_of(rows, batch, k, self.vocab_size, self._host_ids.numpy()))
        return noise.to(self.platform.device), warping.to(self.platform.device)

    def _rows(self, rows: list[list[int]], batch: int, columns: int) -> Tensor:
        """The rows, and rows of the spare slot up to `batch`, int32 on the device."""
        idle = [self.slots.spare, 0, 1, *[0] * (columns - 3)]
        return torch.tensor(rows + [idle] * (batch - len(rows)), dtype=torch.int32, device=self.platform.device)
