"""Checks an NxDI target's batch invariance by the calls of requests.

A decode graph has one batch and one width, so neither other rows nor acceptance changes a row's shape. What can differ:
the decode bucket, and a cache written by context encoding instead of decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tandem.runners.batch_invariance import DEEPEST, check_batch_invariance
from tandem.runners.protocol import Limits, PrefillRow, StepShapes
from tandem_nxdi.lines import Lines

if TYPE_CHECKING:
    from tandem_nxdi.runner import NxdiRunner


def check_target_invariance(runner: NxdiRunner) -> StepShapes:
    """The usable buckets, and whether their bits agree."""
    layout, limits = runner.layout, runner.limits
    room = min(limits.max_length, layout.capacity - layout.span)
    if room < 4 * layout.width:
        return replace(runner.shapes, note=f"not checked: {room} positions are too few to compare steps in")
    chunk = min(layout.chunks[-1], min(room, DEEPEST) // 2)  # so that half of the deepest check can be decoded
    shape = Limits(layout.lines, room, limits.max_draft, chunk, limits.vocab_size)
    shapes = (layout.width,), (layout.lines,)
    found = check_batch_invariance(CheckableTarget(runner), shape, *shapes, exact=runner.exact, graphs=True)
    runner.shapes = replace(found, chunks=layout.chunks[-1:])
    reads = tuple(n for n in layout.reads if not runner.exact or _same(runner, *_reads(runner, n)))
    chunks = tuple(c for c in layout.chunks[:-1] if not runner.exact or _same(runner, *_prompts(runner, c)))
    choices = [*(_reads(runner, n) for n in reads), *(_prompts(runner, c) for c in chunks)]
    alike = runner.exact or all(_same(runner, *choice) for choice in choices)
    return replace(found, bit_exact=found.bit_exact and alike, lengths=reads, chunks=(*chunks, layout.chunks[-1]))


def _prompts(runner: NxdiRunner, chunk: int) -> tuple[int, list[StepShapes]]:
    """A prompt's length, and shapes with the context bucket for `chunk` and with the largest one."""
    return chunk, [replace(runner.shapes, chunks=(c,)) for c in (chunk, runner.layout.chunks[-1])]


def _reads(runner: NxdiRunner, read: int) -> tuple[int, list[StepShapes]]:
    """A prompt's length, and shapes with the decode bucket for `read` positions and with the largest one."""
    longest = min(read - runner.layout.span, runner.layout.chunks[-1])
    return longest, [replace(runner.shapes, lengths=lengths) for lengths in ((read,), ())]


def _same(runner: NxdiRunner, length: int, choices: Sequence[StepShapes]) -> bool:
    """Whether a window after a prompt of `length` tokens has the same bits in all `choices`."""
    before, outputs = runner.shapes, []
    prompt = tuple((7 * i + 1) % runner.limits.vocab_size for i in range(length))
    runner.lines = Lines(runner.layout)
    for runner.shapes in choices:
        runner.encode(0, prompt)
        outputs.append(runner.step({0: (length, prompt[: runner.layout.width])})[0])
    runner.shapes = before
    return bool((outputs[0] == outputs[1]).all())


class CheckableTarget:
    """An NxDI target as the ShapedModel of tandem/runners/batch_invariance.py."""

    device = "cpu"

    def __init__(self, runner: NxdiRunner) -> None:
        self.runner, self.vocab_size = runner, runner.limits.vocab_size

    def forward(
        self, slots: Sequence[int], tokens: Tensor, starts: Tensor, length: int | None = None, head: bool = True
    ) -> Tensor:
        rows = {slot: (int(at), tuple(ids)) for slot, at, ids in zip(slots, starts, tokens.tolist(), strict=True)}
        if not head:
            for slot, (at, ids) in rows.items():
                self._prefill(slot, at, ids)
            return torch.empty(0)
        runner = self.runner
        runner.shapes = replace(runner.shapes, lengths=() if length is None else (length,))
        outputs = runner.step(rows)
        return torch.stack([torch.tensor(outputs[slot]) for slot in slots])

    def tensor(self, values: Sequence[Sequence[int]] | Sequence[int]) -> Tensor:
        return torch.tensor(values)

    def _prefill(self, slot: int, at: int, ids: tuple[int, ...]) -> None:
        fits = ids[: self.runner.layout.capacity - self.runner.layout.span - at]
        (failed,) = self.runner.prefill([PrefillRow(slot, at, fits)])
        if failed is not None:
            raise failed
