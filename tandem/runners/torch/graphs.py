"""Compiles step modules into graphs, one per bucket, before a server is ready and never later."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from tandem.runners.protocol import Limits, StepShapes
from tandem.runners.torch.platforms import Platform

log = logging.getLogger("tandem.engine")
Graph = Callable[..., Any]
Backend = Callable[..., Any]  # a dynamo backend: (traced module, example inputs) -> callable
BUCKETS_AT_MOST = 256  # graphs that dynamo may hold for the code of one step


def buckets_for(
    platform: Platform, limits: Limits, batch_buckets: tuple[int, ...] = (), draft_buckets: tuple[int, ...] = ()
) -> StepShapes:
    """A platform's buckets, with the user's batches and drafts if given. Raises ValueError above the limits."""
    slots, most = limits.slots, limits.max_draft
    batches, drafts = {1}, set[int]()
    if platform.every_bucket:
        batches, drafts = {2**i for i in range(10) if 2**i < slots}, set(range(1, most))
    if batch_buckets:
        batches = _within("batch_buckets", batch_buckets, "batch", slots)
    if draft_buckets:
        drafts = _within("draft_buckets", draft_buckets, "max_speculation_length", most)
    drafted = tuple(sorted(drafts | {most})) if most else ()
    batched = tuple(sorted(batches | {slots}))
    return StepShapes((max(2, most + 1),), batched, False, chunks=(limits.chunk,), drafts=drafted)


def _within(name: str, values: tuple[int, ...], limit: str, most: int) -> set[int]:
    for value in values:
        if not 1 <= value <= most:
            raise ValueError(f"{name}: {value} is outside 1 to {most}, the {limit}")
    return set(values)


class GraphRefused(RuntimeError):
    """A step's shape is not one of the compiled buckets."""


class GraphCompiler:
    """Compiles steps with torch.compile and a dynamo backend, by name or function. `made`: graphs, in `seconds`."""

    def __init__(self, backend: str | Backend) -> None:
        self.made, self.seconds = 0, 0.0
        self._backend, self._sealed = backend, False

    def line(self) -> str:
        return f"{self.made} compiled in {self.seconds:.1f} s" if self.made else "none"

    def graph(self, name: str, step: nn.Module, arguments: Sequence[Any]) -> Graph:
        """Compiles `step` for arguments of these shapes. Raises GraphRefused after `seal`."""
        if self._sealed:
            raise GraphRefused(f"{name}: a graph was requested after warm-up")
        run = torch.compile(step, fullgraph=True, dynamic=False, backend=self._compile)
        bucket = arguments[-1].shape

        def call(*given: Any) -> Any:
            if given[-1].shape != bucket:
                raise GraphRefused(f"{name}: rows of shape {list(given[-1].shape)} are not the bucket's {list(bucket)}")
            with torch.no_grad():
                return run(*given)

        began = time.perf_counter()
        with torch._dynamo.config.patch(recompile_limit=BUCKETS_AT_MOST):
            call(*arguments)
        seconds = time.perf_counter() - began
        log.info("graph %s: compiled and run once in %.1f s", name, seconds)
        self.seconds += seconds
        return call

    def seal(self) -> None:
        """Ends warm-up: a missing graph is an error from now on."""
        self._sealed = True

    def _compile(self, module: Any, example: list[Any]) -> Any:
        if self._sealed:
            raise GraphRefused("a step was about to be compiled again after warm-up")
        self.made += 1
        from torch._dynamo import lookup_backend

        backend = lookup_backend(self._backend) if isinstance(self._backend, str) else self._backend
        return backend(module, example)
