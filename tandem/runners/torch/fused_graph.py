"""A pair's greedy round as one graph and one copy in and out; the next rows stay on the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tandem.runners.protocol import TAIL, FusedResult, FusedRow, Proposal, RowFailed
from tandem.runners.torch.graph_model import GraphModel
from tandem.runners.torch.graph_modules import FusedModule, fused_row
from tandem.runners.torch.graphs import Graph, GraphCompiler
from tandem.runners.torch.model import to_host
from tandem.speculation.types import Verdict

COLUMNS = 4 + TAIL


class FusedGraph:
    """A pair's fused graphs, one per bucket."""

    def __init__(self, target: GraphModel, draft: GraphModel, compiler: GraphCompiler) -> None:
        self.target, self.draft, self.buckets = target, draft, target.buckets
        self._graphs: dict[tuple[int, int], Graph] = {}
        lengths = target.slots.length, draft.slots.length
        for batch in self.buckets.batches:
            for k in self.buckets.drafts:
                step = FusedModule(target, draft, lengths, k, self.buckets.width)
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
        k, width = self.buckets.draft(max(row.propose.k for row in rows)), self.buckets.width
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
        idle_target = self.target.idle_rows([], 1, 3 + self.buckets.width)
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
    drafts, tokens = values[: row.propose.k], values[k : k + width]
    accepted, sound = values[k + width], values[k + width + 1]
    if not sound:
        return RowFailed("target logits: no finite largest logit")
    proposal = Proposal(tuple(drafts), seconds).within(known)
    return FusedResult(proposal, Verdict(tuple(tokens[: accepted + 1]), accepted), seconds)
