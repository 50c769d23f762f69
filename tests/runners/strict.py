"""Every step at every bucket, by Trainium's rules, on arguments that look like a running server's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tandem.runners.protocol import TAIL
from tandem.runners.torch.graph_model import GraphModel
from tandem.runners.torch.graph_runner import FusedGraph
from tandem.runners.torch.graphs import Graph, GraphCompiler, buckets_for
from tandem.runners.torch.platforms import NEURON
from tests.runners.compiled import CACHE, LIMITS, SIZES, module
from tests.runners.graph_check import Captured, checked

TRAINIUM = replace(NEURON, device="cpu")  # its rules, on tensors that are here


class Checking(GraphCompiler):
    """Checks each step whose name begins as `wanted`, on lively arguments, and makes nothing of any."""

    def __init__(
        self, wanted: tuple[str, ...] = (), arguments: Callable[[str, Sequence[Any]], list[Any]] | None = None
    ):
        super().__init__("eager")
        self._wanted, self._arguments = wanted, arguments or lively
        self.graphs: dict[str, Captured] = {}

    def graph(self, name: str, step: nn.Module, arguments: Sequence[Any]) -> Graph:
        if self._wanted and name.startswith(self._wanted):
            self.graphs[name] = checked(step, self._arguments(name, arguments))
        return step.forward


def model(family: str, dtype: torch.dtype, draft: bool, only: Sequence[int] | None = None) -> GraphModel:
    return GraphModel(module(family, dtype, draft), *CACHE, only, platform=TRAINIUM)


def steps(family: str, dtype: torch.dtype, *batches: int) -> dict[str, Captured]:
    """A target's, a draft's and their common ones, for these batches."""
    target, draft = model(family, dtype, False), model(family, dtype, True)
    compiler_for = [Checking(("",)) for _ in range(3)]
    buckets = buckets_for(TRAINIUM, LIMITS, batches)
    target.prepare(compiler_for[0], buckets, verifies=True)
    draft.prepare(compiler_for[1], buckets, verifies=False)
    FusedGraph(target, draft, compiler_for[2])
    kinds = zip(("target", "draft", "both"), compiler_for, strict=True)
    return {f"{kind} {name}": graph for kind, compiler in kinds for name, graph in compiler.graphs.items()}


def lively(name: str, arguments: Sequence[Any]) -> list[Any]:
    """The arguments with full caches, real noise, and rows in the middle of their sequences; the last is padding."""
    chance = torch.Generator().manual_seed(len(name))
    *given, rows = arguments
    given = [_random(value, chance) for value in given]
    count = len(rows)
    fed = torch.randint(0, SIZES["vocab_size"], rows.shape, generator=chance, dtype=torch.int32)
    fed[:, 0] = torch.randperm(LIMITS.slots, generator=chance)[:count]
    fed[:, 1] = torch.randint(TAIL, 60, (count,), generator=chance)
    if not name.startswith("prefill"):
        fed[:, 2] = torch.tensor([min(2, rows.shape[1] - 3), 1])[:count]
    if name.startswith("fused"):
        fed[:, 3] = torch.tensor([3, 2])[:count]
    if count > 1:
        fed[-1] = rows[-1]
    return [*given, fed]


def _random(value: Any, chance: torch.Generator) -> Any:
    if isinstance(value, list | tuple):
        return [_random(each, chance) for each in value]
    return torch.randn(value.shape, generator=chance).to(value.dtype)
