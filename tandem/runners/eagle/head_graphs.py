"""Compiles an EAGLE-3 head's steps into graphs, next to a target with graphs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.runners.eagle.graph_modules import HeadFirst, HeadNext, HeadPrefill, HeadPropose
from tandem.runners.eagle.hidden_states import TargetFeatures
from tandem.runners.eagle.module import EagleHead
from tandem.runners.protocol import TAIL, ProposeRow, RunnerIdentity, StepShapes
from tandem.runners.startup import Startup
from tandem.runners.torch.graph_model import DraftGraphs
from tandem.runners.torch.graph_modules import propose_row
from tandem.runners.torch.graph_runner import GraphRunner
from tandem.runners.torch.graphs import CompileStatistics
from tandem.runners.torch.model import to_host
from tandem.runners.torch.platforms import Platform
from tandem.runners.torch.runner import DraftedToken, tail_buckets
from tandem.runners.torch.slot_cache import SlotCache


class HeadGraphs(DraftGraphs):
    """Graphs for the buckets of `target`, by its compiler. `slots`: the head's keys and values."""

    prefix = "head-"

    def __init__(
        self,
        head: EagleHead,
        features: TargetFeatures,
        embedding: Tensor,
        slots: SlotCache,
        identity: RunnerIdentity,
        platform: Platform,
        target: GraphRunner,
    ) -> None:
        self.platform, self.device, self.spare = platform, platform.device, slots.spare
        self.buckets = target.buckets
        self._head, self._name, self._graphs = head, identity.model_name, {}
        self._compiler = target.compiler_for(f"head {identity.weights_revision} on {target.identity.weights_revision}")
        self._buffers = [*slots.buffers, features.values.flatten(0, 1)[None], embedding]
        columns = torch.arange(slots.length, dtype=torch.int32, device=platform.device)
        self._shape = head, columns, features.values.shape[1]

    @property
    def shapes(self) -> StepShapes:
        return StepShapes(tail_buckets(), self.buckets.batches, False, chunks=(self.buckets.chunk,))

    def compile(self, startup: Startup) -> CompileStatistics:
        """Compiles every graph, without drafting, and seals the compiler."""
        compiler, shape = self._compiler, self._shape
        with startup.stage("compiling"):
            self._make(compiler, "prefill", HeadPrefill(*shape), 1, self.buckets.chunk, 2 + self.buckets.chunk)
            for batch in self.buckets.batches:
                for k in self.buckets.drafts:
                    self._make(compiler, "propose", HeadPropose(*shape, k), batch, k, 3 + TAIL)
                if self.platform.only_graphs and self.buckets.drafts:
                    self._make(compiler, "first", HeadFirst(*shape), batch, TAIL, 3 + TAIL)
                    states = self._head.fc.weight.new_zeros(batch, self._head.config.hidden_size)
                    self._make(compiler, "next", HeadNext(*shape), batch, 1, 4, (states,))
            compiler.seal()
        startup.note(f"graphs of {self._name}: {compiler.statistics.line()}")
        return compiler.statistics

    def warm_up(self, startup: Startup) -> None:
        self.compile(startup)
        with startup.stage("warming"):
            for batch in self.buckets.batches if self.buckets.drafts else ():
                to_host(self.proposed(self.idle_rows([], batch, 3 + TAIL), self.buckets.drafts[-1]))

    def logits(self, rows: Sequence[ProposeRow], drafts: Sequence[Sequence[DraftedToken]]) -> Tensor:
        """Like DraftGraphs.logits; the head's states stay on the device."""
        batch = self.buckets.batch(len(rows))
        if not drafts[0]:
            packed = self.tensor(self.idle_rows([propose_row(row) for row in rows], batch, 3 + TAIL))
            logits, self._states = self._graph("first", batch, TAIL)(self._buffers, packed)
        else:
            fed = [[r.slot, r.position + len(d), 1, d[-1].token] for r, d in zip(rows, drafts, strict=True)]
            packed = self.tensor(self.idle_rows(fed, batch, 4))
            logits, self._states = self._graph("next", batch, 1)(self._buffers, self._states, packed)
        host: Tensor = logits.cpu()
        return host[: len(rows)]
