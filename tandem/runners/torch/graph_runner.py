"""Runs the torch runner's steps as graphs: a greedy step is one graph and one copy to the host.

The host samples a target's tokens: draws need 64-bit arithmetic, and noise for a vocabulary is as large as its logits.
A draft samples in module code; if only graphs may run, in a graph from given noise, and under the rejection rule on the
host from one graph per token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from tandem.runners.batch_invariance import check_fused_invariance, check_graph_invariance
from tandem.runners.capabilities import Capabilities, Trait
from tandem.runners.eagle.hidden_states import TargetFeatures
from tandem.runners.fused_step import fused_step
from tandem.runners.protocol import (
    TAIL,
    FusedResult,
    FusedRow,
    FusedStep,
    Limits,
    PrefillRow,
    Proposal,
    ProposeRow,
    RowFailed,
    Runner,
    RunnerIdentity,
    StepShapes,
    VerifyRow,
    sized,
)
from tandem.runners.startup import Startup
from tandem.runners.torch.buckets import Buckets, buckets_for
from tandem.runners.torch.fused_graph import FusedGraph
from tandem.runners.torch.graph_model import GraphModel
from tandem.runners.torch.graph_modules import verify_row
from tandem.runners.torch.graphs import CompileStatistics, GraphCompiler
from tandem.runners.torch.model import to_host
from tandem.runners.torch.platforms import COMPILE_ONLY, compiles_only
from tandem.runners.torch.runner import (
    TorchRunner,
    batch_buckets,
    length_buckets,
    tail_buckets,
)
from tandem.speculation.types import Verdict

CompilerFor = Callable[[str], GraphCompiler]


class GraphRunner(TorchRunner):
    """Runs a GraphModel. `compiler_for(purpose)` returns a compiler for a model's or pair's graphs."""

    model: GraphModel

    def __init__(
        self,
        model: GraphModel,
        limits: Limits,
        identity: RunnerIdentity,
        compiler_for: CompilerFor,
        verifies: bool = True,
        exact: bool = True,
        buckets: Buckets | None = None,
    ) -> None:
        super().__init__(model, limits, identity, verifies, exact)
        self._compiler_for, self._buckets = compiler_for, buckets or buckets_for(model.platform, limits)
        self._fused: dict[int, FusedGraph] = {}
        self._layers: tuple[int, ...] = ()
        self._features: TargetFeatures | None = None

    @property
    def capabilities(self) -> Capabilities:
        own = super().capabilities
        return replace(own, traits=own.traits | {Trait.GRAPHS}, fuse=self.fuse)

    @property
    def buckets(self) -> Buckets:
        return self._buckets

    def compiler_for(self, purpose: str) -> GraphCompiler:
        return self._compiler_for(purpose)

    def hand_out(self, layers: Sequence[int]) -> TargetFeatures:
        """Like FeaturesOut.hand_out, before `warm_up`. Raises ValueError for other layers than compiled graphs have."""
        if self._features is None:
            if self.model.graph_names:
                raise ValueError("draft: the target's graphs were made without an EAGLE head; load both together")
            self._layers, self._features = tuple(layers), self.model.hand_out(layers)
        if tuple(layers) != self._layers:
            raise ValueError(f"draft: the target's graphs hand out layers {list(self._layers)}, not {list(layers)}")
        return self._features

    def warm_up(self, startup: Startup | None = None) -> None:
        if self.model.platform.only_graphs and compiles_only():
            raise ValueError(f"device: with {COMPILE_ONLY}=1 only --role compile works; unset it to serve")
        startup = startup or Startup()
        self.compile(startup)
        with startup.stage("certifying"):
            self.shapes = self._certified()
        with startup.stage("warming"):
            self._warm()

    def compile(self, startup: Startup) -> CompileStatistics:
        """Compiles this model's graphs, without running them, and seals the compiler."""
        compiler = self._compiler_for(self._purpose)
        with startup.stage("compiling"):
            self.model.prepare(compiler, self._buckets, self._verifies)
            compiler.seal()
        startup.note(f"graphs of {self.identity.model_name}: {compiler.statistics.line()}")
        return compiler.statistics

    @property
    def _purpose(self) -> str:
        if not self._verifies:
            return "draft"
        return f"target handing out layers {list(self._layers)}" if self._layers else "target"

    def _certified(self) -> StepShapes:
        if self._verifies:
            buckets = self.model.buckets
            return check_graph_invariance(self.model, self.limits, buckets.width, buckets.batches, self._exact)
        batches, lengths = batch_buckets(self.limits.slots), length_buckets(self.limits)
        return StepShapes(tail_buckets(), batches, False, lengths, (self.limits.chunk,))

    def _warm(self) -> None:
        for batch in self.shapes.batches if self._verifies else self.model.buckets.batches:
            if self._verifies:
                self.model.verified(self.model.idle_rows([], batch, 3 + self.model.buckets.width))
            elif self.model.buckets.drafts:
                self.model.proposed(self.model.idle_rows([], batch, 3 + TAIL), self.model.buckets.drafts[-1])

    def prefill(self, rows: Sequence[PrefillRow]) -> list[RowFailed | None]:
        return self.model.prefill(rows)

    def _verdicts(self, rows: Sequence[VerifyRow]) -> list[Verdict | RowFailed]:
        if not all(row.plain for row in rows):
            return super()._verdicts(rows)
        _, results = self._verified(rows)
        return [verdict_of(values, self.model.buckets.width) for values in to_host(results)[: len(rows)]]

    def verify_logits(self, rows: Sequence[VerifyRow]) -> Tensor:
        return self._verified(rows)[0]

    def _verified(self, rows: Sequence[VerifyRow]) -> tuple[Tensor, Tensor]:
        packed = [verify_row(row, self.model.buckets.width) for row in rows]
        return self.model.verified(self.model.idle_rows(packed, self.shapes.batch(len(rows)), len(packed[0])))

    def propose(self, rows: Sequence[ProposeRow]) -> list[Proposal | RowFailed]:
        return self.model.propose(rows, self.model) if self.model.drafts(rows) else super().propose(rows)

    def fuse(self, draft: Runner, startup: Startup) -> None:
        """Compiles a pair's graph if both are graph runners on one device; see `fused_with`."""
        if not isinstance(draft, GraphRunner) or draft.model.device != self.model.device:
            return
        graph, _ = self.compile_fused(draft, startup)
        with startup.stage("certifying"):
            same = check_fused_invariance(graph, self.limits, self.shapes)
        if not same and self._exact:
            startup.note("the fused graph's bits are not those of verification: without --fast it is left out")
            return
        if not same:
            self.shapes = replace(self.shapes, bit_exact=False)
        with startup.stage("warming"):
            graph.measure()
        self._fused[id(draft)] = graph

    def compile_fused(self, draft: GraphRunner, startup: Startup) -> tuple[FusedGraph, CompileStatistics]:
        """Compiles the pair's graphs, without running them, and seals the compiler."""
        only = draft.model.draft_vocab
        facts = draft.identity.weights_revision, draft.limits, None if only is None else only.tolist()
        compiler = self._compiler_for(f"fused with {facts}")
        with startup.stage("compiling"):
            graph = FusedGraph(self.model, draft.model, compiler)
            compiler.seal()
        startup.note(f"graphs of both: {compiler.statistics.line()}")
        return graph, compiler.statistics

    def fused_with(self, draft: Runner) -> FusedStep | None:
        """A greedy round as one graph if `fuse` made one; other rows take two steps."""
        graph = self._fused.get(id(draft))
        return None if graph is None else functools.partial(_fused, graph, self, draft)


def _fused(graph: FusedGraph, target: Runner, draft: Runner, rows: Sequence[FusedRow]) -> list[FusedResult | RowFailed]:
    if not graph.fits(rows):
        return fused_step(target, draft, rows)
    results, widths = graph.step(rows), [1 + row.propose.k for row in rows]
    for row, result in zip(rows, results, strict=True):
        if isinstance(result, RowFailed):
            graph.target.slots.clear(row.propose.slot)
            graph.draft.slots.clear(row.propose.slot)
    return sized(results, target.shapes, widths)


def verdict_of(values: list[int], width: int) -> Verdict | RowFailed:
    """Unpacks `width` tokens, the accepted count, and whether logits are finite."""
    accepted, sound = values[width], values[width + 1]
    if not sound:
        return RowFailed("target logits: no finite largest logit")
    return Verdict(tuple(values[: accepted + 1]), accepted)
