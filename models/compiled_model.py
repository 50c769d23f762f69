"""A TorchModel whose steps are graphs: one per bucket, made at warm-up. No other shape is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.graphs import Graph, GraphRefused, Maker
from models.runner import TAIL
from models.steps import PrefillStep, ProposeStep, VerifyStep
from models.torch_model import TorchModel


@dataclass(frozen=True, slots=True)
class Buckets:
    """Shapes to make graphs of.

    batches: rows per step. width: tokens per row of a verification, the same for all. chunk: tokens of a prefill step.
    drafts: draft tokens per step, ascending.
    """

    batches: tuple[int, ...]
    width: int
    chunk: int
    drafts: tuple[int, ...]

    def batch(self, rows: int) -> int:
        return next(b for b in self.batches if b >= rows)

    def draft(self, k: int) -> int:
        return next(d for d in self.drafts if d >= k)


def buckets_for(device: str, slots: int, max_draft: int, chunk: int) -> Buckets:
    """Few on the CPU, where a graph of the target takes a minute; on CUDA one takes seconds.

    Verification has one width everywhere, and at least 2: a product of one row is another kernel, with other bits.
    """
    width = max(2, max_draft + 1)
    if device == "cuda":
        batches = tuple(sorted({*(2**i for i in range(10) if 2**i < slots), slots}))
        return Buckets(batches, width, chunk, tuple(range(1, max_draft + 1)))
    return Buckets(tuple(sorted({1, slots})), width, chunk, (max_draft,) if max_draft else ())


class CompiledModel(TorchModel):
    """Runs graphs where TorchModel runs module code. `prepare` makes them."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "packed": False})
        self._graphs: dict[tuple[str, int, int], Graph] = {}
        self._buffers = self.slots.buffers

    @property
    def buffers(self) -> list[Tensor]:
        return self._buffers

    def prepare(self, maker: Maker, buckets: Buckets, verifies: bool) -> None:
        """Makes the graphs of a target, or of a draft."""
        self.buckets = buckets
        self._verifies = verifies
        length = self.slots.length
        self._make(maker, "prefill", PrefillStep(self, length), 1, buckets.chunk, 2 + buckets.chunk)
        for batch in buckets.batches:
            if verifies:
                self._make(maker, "verify", VerifyStep(self, length), batch, buckets.width, 3 + buckets.width)
                continue
            for k in buckets.drafts:
                self._make(maker, "propose", ProposeStep(self, length, k), batch, k, 3 + TAIL)

    def _make(self, maker: Maker, name: str, step: Any, batch: int, size: int, columns: int) -> None:
        rows = self.tensor(self.idle_rows([], batch, columns))
        self._graphs[name, batch, size] = maker.graph(f"{name}-{batch}x{size}", step, (self._buffers, rows))

    def idle_rows(self, rows: list[list[int]], batch: int, columns: int) -> list[list[int]]:
        """The rows, and rows of the spare slot up to a batch; one token at position 0 (the third column is a count)."""
        return rows + [[self.spare, 0, 1, *[0] * (columns - 3)]] * (batch - len(rows))

    @torch.no_grad()
    def forward(
        self, slots: Sequence[int], tokens: Tensor, starts: Tensor, length: int | None = None, head: bool = True
    ) -> Tensor:
        """As TorchModel's. A draft's logits, which only sampled rows ask for, come from module code."""
        if head and not self._verifies:
            return super().forward(slots, tokens, starts, length, head)
        rows, width = tokens.shape
        front = [self.tensor(list(slots)), starts, *([torch.zeros_like(starts)] if head else [])]
        packed = torch.cat((torch.stack(front, dim=1), tokens), dim=1)
        if not head:
            results: Tensor = self._graph("prefill", rows, width)(self._buffers, packed)
            return results
        logits: Tensor = self._graph("verify", rows, width)(self._buffers, packed)[0]
        return logits.clone() if self.device == "cuda" else logits

    def verified(self, rows: list[list[int]]) -> Tensor:
        """VerifyStep's results for rows as `steps.verify_row` packs them, on the device."""
        packed = self.tensor(self.idle_rows(rows, self.buckets.batch(len(rows)), 3 + self.buckets.width))
        results: Tensor = self._graph("verify", len(packed), self.buckets.width)(self._buffers, packed)[1]
        return results

    def proposed(self, rows: list[list[int]], k: int) -> Tensor:
        """ProposeStep's draft tokens, at least `k` a row, on the device."""
        packed = self.tensor(self.idle_rows(rows, self.buckets.batch(len(rows)), 3 + TAIL))
        drafts: Tensor = self._graph("propose", len(packed), self.buckets.draft(k))(self._buffers, packed)
        return drafts

    def _graph(self, name: str, batch: int, size: int) -> Graph:
        try:
            return self._graphs[name, batch, size]
        except KeyError:
            raise GraphRefused(f"no graph was made to {name} {batch} rows of {size} tokens") from None
