"""The torch runner on graphs: a greedy step is one graph and one host copy; sampled rows are drawn on the host."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

from models.certify import certify_fused, certify_graphs
from models.compiled_model import CompiledModel, buckets_for
from models.fused_graph import FusedGraph
from models.graphs import Maker
from models.runner import (
    TAIL,
    FusedResult,
    FusedRow,
    FusedStep,
    Identity,
    Limits,
    Proposal,
    ProposeRow,
    RowFailed,
    Runner,
    StepShapes,
    VerifyRow,
    fused_step,
    sized,
)
from models.startup import Startup
from models.steps import propose_row, verify_row
from models.torch_model import to_host
from models.torch_runner import TorchRunner, batch_buckets, length_buckets, tail_buckets
from speculation.types import Verdict

Makers = Callable[[str], Maker]


class CompiledRunner(TorchRunner):
    """Runs one CompiledModel. `makers(name)` gives what makes the graphs of a model, or of a pair with `name`."""

    model: CompiledModel

    def __init__(
        self,
        model: CompiledModel,
        limits: Limits,
        identity: Identity,
        makers: Makers,
        verifies: bool = True,
        exact: bool = True,
    ) -> None:
        super().__init__(model, limits, identity, verifies, exact)
        self._makers = makers
        self._fused: dict[int, FusedGraph] = {}

    def warm_up(self, startup: Startup | None = None) -> None:
        startup = startup or Startup()
        limits, maker = self.limits, self._makers("target" if self._verifies else "draft")
        buckets = buckets_for(self.model.device, limits.slots, limits.max_draft, limits.chunk)
        with startup.stage("compiling"):
            self.model.prepare(maker, buckets, self._verifies)
            maker.seal()
        startup.note(f"graphs of {self.identity.model_name}: {maker.made.line()}")
        with startup.stage("certifying"):
            self.shapes = self._certified()
        with startup.stage("warming"):
            self._warm()

    def _certified(self) -> StepShapes:
        if self._verifies:
            buckets = self.model.buckets
            return certify_graphs(self.model, self.limits, buckets.width, buckets.batches, self._exact)
        batches, lengths = batch_buckets(self.limits.slots), length_buckets(self.limits)
        return StepShapes(tail_buckets(), batches, False, lengths, (self.limits.chunk,))

    def _warm(self) -> None:
        for batch in self.shapes.batches if self._verifies else self.model.buckets.batches:
            if self._verifies:
                self.model.verified(self.model.idle_rows([], batch, 3 + self.model.buckets.width))
            elif self.model.buckets.drafts:
                self.model.proposed(self.model.idle_rows([], batch, 3 + TAIL), self.model.buckets.drafts[-1])

    def _verdicts(self, rows: Sequence[VerifyRow]) -> list[Verdict | RowFailed]:
        if not all(row.sampling.greedy and not row.margins for row in rows):
            return super()._verdicts(rows)
        width = self.model.buckets.width
        host = to_host(self.model.verified(self._padded([verify_row(row, width) for row in rows])))
        return [_verdict(values, width) for values in host[: len(rows)]]

    def _padded(self, rows: list[list[int]]) -> list[list[int]]:
        """Rows for the batches that were found to agree, which may be fewer than there are graphs of."""
        return self.model.idle_rows(rows, self.shapes.batch(len(rows)), len(rows[0]))

    def propose(self, rows: Sequence[ProposeRow]) -> list[Proposal | RowFailed]:
        k = max(row.k for row in rows)
        if not k or not all(row.sampling.greedy for row in rows):
            return super().propose(rows)
        began = time.perf_counter()
        drafts = to_host(self.model.proposed([propose_row(row) for row in rows], k))
        seconds = time.perf_counter() - began
        return [Proposal(tuple(d[: row.k]), seconds) for row, d in zip(rows, drafts, strict=False)]

    def fuse(self, draft: Runner, startup: Startup) -> None:
        """Makes one graph of this target and `draft`, on the same device; from then on `fused` uses it."""
        if not isinstance(draft, CompiledRunner) or draft.model.device != self.model.device:
            return
        only = draft.model.only
        facts = draft.identity.weights_revision, draft.limits, None if only is None else only.tolist()
        maker = self._makers(f"fused with {facts}")
        with startup.stage("compiling"):
            graph = FusedGraph(self.model, draft.model, maker)
            maker.seal()
        startup.note(f"graphs of both: {maker.made.line()}")
        with startup.stage("certifying"):
            same = certify_fused(graph, self.limits, self.shapes)
        if not same and self._exact:
            startup.note("the fused graph's bits are not those of verification: --exact leaves it out")
            return
        if not same:
            self.shapes = self.shapes.inexact()
        with startup.stage("warming"):
            graph.measure()
        self._fused[id(draft)] = graph

    def fused_with(self, draft: Runner) -> FusedStep | None:
        """A greedy round as one call, where `fuse` made a graph of the pair and rows fit it; else as its parts."""
        graph = self._fused.get(id(draft))
        return None if graph is None else functools.partial(_fused, graph, self, draft)


def _fused(graph: FusedGraph, target: Runner, draft: Runner, rows: Sequence[FusedRow]) -> list[FusedResult | RowFailed]:
    if not graph.fits(rows):
        return fused_step(target, draft, rows)
    results, width = graph.step(rows), 1 + max(row.propose.k for row in rows)
    for row, result in zip(rows, results, strict=True):
        if isinstance(result, RowFailed):
            graph.target.slots.clear(row.propose.slot)
            graph.draft.slots.clear(row.propose.slot)
    seconds = max((r.proposal.seconds for r in results if isinstance(r, FusedResult)), default=0.0)
    return [sized(result, len(rows), width, seconds) for result in results]


def _verdict(values: list[int], width: int) -> Verdict | RowFailed:
    accepted, sound = values[width], values[width + 1]
    if not sound:
        return RowFailed("target logits: no finite largest logit")
    return Verdict(tuple(values[: accepted + 1]), accepted)
