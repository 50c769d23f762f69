"""Runs the torch runner's steps as graphs: a greedy step is one graph and one copy to the host.

The host samples a target's tokens: draws need 64-bit arithmetic, and noise for a vocabulary is as large as its logits.
A draft samples in module code; if only graphs may run, on the host from one graph per token.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tandem.runners.batch_invariance import check_batch_invariance, check_fused_invariance
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
from tandem.runners.torch.graph_model import GraphModel
from tandem.runners.torch.graph_modules import FusedModule, fused_row, verdict_of, verify_row
from tandem.runners.torch.graphs import Graph, GraphCompiler, buckets_for
from tandem.runners.torch.platforms import COMPILE_ONLY, compiles_only
from tandem.runners.torch.slot_model import to_host
from tandem.runners.torch.torch_runner import TorchRunner, batch_buckets, length_buckets, tail_buckets
from tandem.speculation.types import Verdict


class GraphRunner(TorchRunner):
    """Runs a GraphModel. `compiler()`: a compiler for a model's or pair's graphs."""

    model: GraphModel

    def __init__(
        self,
        model: GraphModel,
        limits: Limits,
        identity: RunnerIdentity,
        compiler: Callable[[], GraphCompiler],
        verifies: bool = True,
        exact: bool = True,
        buckets: StepShapes | None = None,
    ) -> None:
        super().__init__(model, limits, identity, verifies, exact)
        self.compiler, self.buckets = compiler, buckets or buckets_for(model.platform, limits)
        self._fused: dict[int, FusedGraph] = {}
        self._features: TargetFeatures | None = None

    @property
    def capabilities(self) -> Capabilities:
        own = super().capabilities
        return replace(own, traits=own.traits | {Trait.GRAPHS}, fuse=self.fuse)

    def hand_out(self, layers: Sequence[int]) -> TargetFeatures:
        """Like FeaturesOut.hand_out, before `warm_up`. Raises ValueError for other layers than compiled graphs have."""
        if self._features is None:
            if self.model.graph_names:
                raise ValueError("draft: the target's graphs were made without an EAGLE head; load both together")
            self._features = self.model.hand_out(layers)
        if tuple(layers) != self.model.layers:
            raise ValueError(
                f"draft: the target's graphs hand out layers {list(self.model.layers)}, not {list(layers)}"
            )
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

    def compile(self, startup: Startup) -> str:
        """Compiles this model's graphs and seals the compiler; returns the compiler's line."""
        compiler = self.compiler()
        with startup.stage("compiling"):
            self.model.prepare(compiler, self.buckets, self._verifies)
            compiler.seal()
        startup.note(f"graphs of {self.identity.model_name}: {compiler.line()}")
        return compiler.line()

    def _certified(self) -> StepShapes:
        if self._verifies:
            shapes = self.buckets.widths, self.buckets.batches
            return check_batch_invariance(self.model, self.limits, *shapes, exact=self._exact, graphs=True)
        batches, lengths = batch_buckets(self.limits.slots), length_buckets(self.limits)
        return StepShapes(tail_buckets(), batches, False, lengths, (self.limits.chunk,))

    def _warm(self) -> None:
        for batch in self.shapes.batches if self._verifies else self.buckets.batches:
            if self._verifies:
                self.model.verified(self.model.idle_rows([], batch, 3 + self.buckets.widths[0]))
            elif self.buckets.drafts:
                self.model.proposed(self.model.idle_rows([], batch, 3 + TAIL), self.buckets.drafts[-1])

    def prefill(self, rows: Sequence[PrefillRow]) -> list[RowFailed | None]:
        return self.model.prefill(rows)

    def _verdicts(self, rows: Sequence[VerifyRow]) -> list[Verdict | RowFailed]:
        if not all(row.plain for row in rows):
            return super()._verdicts(rows)
        _, results = self._verified(rows)
        return [verdict_of(values, self.buckets.widths[0]) for values in to_host(results)[: len(rows)]]

    def verify_logits(self, rows: Sequence[VerifyRow]) -> Tensor:
        return self._verified(rows)[0]

    def _verified(self, rows: Sequence[VerifyRow]) -> tuple[Tensor, Tensor]:
        packed = [verify_row(row, self.buckets.widths[0]) for row in rows]
        return self.model.verified(self.model.idle_rows(packed, self.shapes.batch(len(rows)), len(packed[0])))

    def propose(self, rows: Sequence[ProposeRow]) -> list[Proposal | RowFailed]:
        if not self.model.drafts(rows):
            return super().propose(rows)
        return self.model.propose(rows, self.model.vocab_size, self.model.draft_vocab)

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

    def compile_fused(self, draft: GraphRunner, startup: Startup) -> tuple[FusedGraph, str]:
        """Compiles the pair's graphs and seals the compiler; returns the compiler's line too."""
        compiler = self.compiler()
        with startup.stage("compiling"):
            graph = FusedGraph(self.model, draft.model, compiler)
            compiler.seal()
        startup.note(f"graphs of both: {compiler.line()}")
        return graph, compiler.line()

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


COLUMNS = 4 + TAIL


class FusedGraph:
    """A pair's greedy round as one graph per bucket, and one copy in and out; the next rows stay on the device."""

    def __init__(self, target: GraphModel, draft: GraphModel, compiler: GraphCompiler) -> None:
        self.target, self.draft, self.buckets = target, draft, target.buckets
        self._graphs: dict[tuple[int, int], Graph] = {}
        for batch in self.buckets.batches:
            for k in self.buckets.drafts:
                step = FusedModule(target, draft, k, self.buckets.widths[0])
                rows = target.tensor(target.idle_rows([], batch, COLUMNS))
                name = f"fused-{batch}x{k}"
                self._graphs[batch, k] = compiler.graph(name, step, (target.buffers, draft.buffers, rows))
        self._next: tuple[list[list[int]], Tensor] | None = None
        self.draft_share = 0.0

    def fits(self, rows: Sequence[FusedRow]) -> bool:
        """Whether all rows are greedy, draft, and need tokens alone."""
        return bool(self._graphs) and all(row.plain and row.propose.k and not row.copied for row in rows)

    def step(self, rows: Sequence[FusedRow]) -> list[FusedResult | RowFailed]:
        began = time.perf_counter()
        _, after, results = self.run([fused_row(row.propose) for row in rows])
        host = to_host(results)
        self._next = [values[-COLUMNS:] for values in host], after
        k, width = self.buckets.draft(max(row.propose.k for row in rows)), self.buckets.widths[0]
        seconds = (time.perf_counter() - began) * self.draft_share
        known = self.target.vocab_size
        return [_result(row, values, k, width, known, seconds) for row, values in zip(rows, host, strict=False)]

    @torch.no_grad()
    def run(self, rows: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
        """Runs FusedModule on packed rows; uploads nothing if the previous round predicted them."""
        batch, k = self.buckets.batch(len(rows)), self.buckets.draft(max(row[3] for row in rows))
        padded = self.target.idle_rows(rows, batch, COLUMNS)
        known = self._next is not None and self._next[0] == padded
        packed = self._next[1] if known and self._next else self.target.tensor(padded)
        step: tuple[Tensor, Tensor, Tensor] = self._graphs[batch, k](self.target.buffers, self.draft.buffers, packed)
        return step

    @property
    def shapes(self) -> Sequence[tuple[int, int]]:
        return list(self._graphs)

    def probe(self, token: int, position: int, batch: int, k: int) -> tuple[Tensor, list[list[int]]]:
        """Runs `token` at `position` in the last `batch` slots: logits [batch, width, vocabulary], k drafts per row."""
        slots = list(range(self.target.spare))[::-1][:batch]
        logits, _, results = self.run([[slot, position, 1, k, *[token] * TAIL] for slot in slots])
        known = self.target.vocab_size
        fed = [[t if t < known else 0 for t in values[:k]] for values in to_host(results)]
        return logits.clone(), fed

    def measure(self, clock: Callable[[], float] = time.perf_counter) -> None:
        # a graph cannot be timed inside, so draft and target are timed alone
        k = self.buckets.drafts[-1]
        idle_draft = self.draft.idle_rows([], 1, 3 + TAIL)
        idle_target = self.target.idle_rows([], 1, 3 + self.buckets.widths[0])
        draft = _median(lambda: self.draft.proposed(idle_draft, k), clock)
        target = _median(lambda: self.target.verified(idle_target)[1], clock)
        self.draft_share = draft / (draft + target)


def _median(step: Callable[[], Tensor], clock: Callable[[], float]) -> float:
    taken = []
    for _ in range(5):
        began = clock()
        to_host(step())
        taken.append(clock() - began)
    return sorted(taken)[len(taken) // 2]


def _result(
    row: FusedRow, values: list[int], k: int, width: int, known: int, seconds: float
) -> FusedResult | RowFailed:
    verdict = verdict_of(values[k:], width)
    if isinstance(verdict, RowFailed):
        return verdict
    return FusedResult(Proposal(tuple(values[: row.propose.k]), seconds).within(known), verdict, seconds)
