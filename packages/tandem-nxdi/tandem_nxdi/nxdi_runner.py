"""Runs NxDI models: a target fed windows, or a draft fed single tokens.

Logits are copied to the host, for the seeded draws and verdicts of all backends. A target's batch invariance is
checked by the calls of requests: a decode graph has one batch and one width, so neither other rows nor acceptance
changes a row's shape. What can differ: the decode bucket, and a cache written by context encoding instead of decoding.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.checkpoints.adapter_files import Adapter
from tandem.runners.batch_invariance import DEEPEST, check_batch_invariance
from tandem.runners.capabilities import Capabilities, No, Trait
from tandem.runners.protocol import (
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
    draft_next,
    verdict_or_failure,
    verify_row,
)
from tandem.runners.startup import Startup
from tandem.speculation.rules import agree
from tandem.speculation.types import SparseDistribution, Verdict
from tandem_nxdi.adapters import NxdiAdapters
from tandem_nxdi.lines import LineError, Lines
from tandem_nxdi.shapes import Layout

if TYPE_CHECKING:
    from tandem_nxdi.sdk import Application

Array = NDArray[Any]
UNNAMED = No("NxD Inference holds those that --adapters names at start, and it names none")
UNCHECKED = "not checked: its logits stay on the device; outputs may leave plain decoding's at ties"


class NxdiRunner:
    """`tokens_only`: logits stay on the device. `exact`: uses one decode shape unless all give the same bits."""

    def __init__(
        self,
        device: Application,
        layout: Layout,
        limits: Limits,
        identity: RunnerIdentity,
        verifies: bool = True,
        exact: bool = True,
        tokens_only: bool = False,
        adapters: NxdiAdapters | None = None,
    ) -> None:
        self._adapters = adapters or NxdiAdapters()
        self.device, self.layout, self.limits, self.identity = device, layout, limits, identity
        self.lines, self.exact, self.tokens_only = Lines(layout), exact, tokens_only
        self._verifies = verifies
        self.shapes = StepShapes(
            (layout.width,), (layout.lines,), False, chunks=layout.chunks if not verifies else layout.chunks[-1:]
        )

    @property
    def capabilities(self) -> Capabilities:
        traits = {Trait.NXD_INFERENCE, *({Trait.TOKENS_ONLY} if self.tokens_only else ())}
        return Capabilities(frozenset(traits), adapters=self.put_adapter if self._adapters.there else UNNAMED)

    def put_adapter(self, number: int, adapter: Adapter) -> None:
        self._adapters.put(number, adapter)

    def warm_up(self, startup: Startup | None = None) -> None:
        """Compares a target's shapes bit by bit if logits are visible. NxDI warmed up at load."""
        if not self._verifies:
            self.shapes = replace(self.shapes, lengths=self.layout.reads)
        elif self.tokens_only:
            lengths = () if self.exact else self.layout.reads
            self.shapes = replace(self.shapes, chunks=self.layout.chunks, lengths=lengths, note=UNCHECKED)
        else:
            with (startup or Startup()).stage("certifying"):
                self.shapes = check_target_invariance(self)
        self.lines = Lines(self.layout)

    def prefill(self, rows: Sequence[PrefillRow]) -> list[RowFailed | None]:
        return [self._prefill(row) for row in rows]

    def verify(self, rows: Sequence[VerifyRow]) -> list[Verdict | RowFailed]:
        place = self._adapters.place
        feeds = [PrefillRow(row.slot, row.position, (row.last_token, *row.draft), place(row.adapter)) for row in rows]
        return [
            outputs if isinstance(outputs, RowFailed) else self._verify_row(row, outputs)
            for row, outputs in zip(rows, self.feed(feeds), strict=True)
        ]

    def propose(self, rows: Sequence[ProposeRow]) -> list[Proposal | RowFailed]:
        """Like Runner.propose; a row leaves the batch at its k tokens."""
        began = time.perf_counter()
        drafts: list[tuple[list[int], list[SparseDistribution]]] = [([], []) for _ in rows]
        failed: dict[int, RowFailed] = {}
        active = [r for r, row in enumerate(rows) if row.k]
        while active:
            feeds = [_next_feed(rows[r], drafts[r][0]) for r in active]
            for r, outputs in zip(active, self.feed(feeds), strict=True):
                if isinstance(outputs, RowFailed):
                    failed[r] = outputs
                else:
                    self._draw(rows[r], outputs[-1], *drafts[r])
            active = [r for r in active if r not in failed and len(drafts[r][0]) < rows[r].k]
        seconds = time.perf_counter() - began
        return [
            failed.get(r) or Proposal(tuple(tokens), seconds, tuple(sent)) for r, (tokens, sent) in enumerate(drafts)
        ]

    def fused_with(self, draft: Runner) -> FusedStep | None:
        return None

    def feed(self, feeds: Sequence[PrefillRow]) -> list[Array | RowFailed]:
        """Feeds rows of any lengths, with NxDI's numbers of adapters; returns predictions.

        Predictions of a row: logits [tokens, vocabulary], or ids [tokens] if tokens_only.
        """
        outputs: list[list[Array]] = [[] for _ in feeds]
        done = [0] * len(feeds)
        failed: dict[int, RowFailed] = {}
        for r, each in enumerate(feeds):
            try:
                self.lines.check(each.slot, each.start, len(each.tokens), each.adapter)
            except LineError as error:
                failed[r] = RowFailed(str(error))
                continue
            if each.start == 0:
                outputs[r].append(self.after_first(each.slot, each.tokens[0], each.adapter))
                done[r] = 1
        while active := [r for r, each in enumerate(feeds) if r not in failed and done[r] < len(each.tokens)]:
            rows = {}
            for r in active:
                each = feeds[r]
                rows[each.slot] = (each.start + done[r], each.tokens[done[r] : done[r] + self.layout.width])
            predicted = self.step(rows)
            for r in active:
                outputs[r].append(predicted[feeds[r].slot])
                done[r] += len(rows[feeds[r].slot][1])
        return [failed.get(r) or np.concatenate(each) for r, each in enumerate(outputs)]

    def step(self, rows: dict[int, tuple[int, tuple[int, ...]]]) -> dict[int, Array]:
        """A decode call by line of (position, tokens); returns predictions by line, as `feed`."""
        answer, windows = self.call(rows)
        for line, (start, tokens) in rows.items():
            self.lines.note(line, start, tokens)
        return {line: self.predicted(answer, line, window) for line, window in windows.items()}

    def call(self, rows: dict[int, tuple[int, tuple[int, ...]]]) -> tuple[Sequence[Array], dict[int, slice]]:
        call, windows = self.lines.step(rows, self.shapes.length(self.lines.reach(rows)))
        return self.device.run(call), windows

    def predicted(self, answer: Sequence[Array], line: int, window: slice) -> Array:
        """A window's predictions."""
        return answer[line][window]

    def encode(self, line: int, tokens: Sequence[int], adapter: int = 0) -> None:
        """Encodes tokens from position 0 of a line, and sets its adapter."""
        self.device.run(self.lines.prompt(line, tokens, self.shapes.chunk(len(tokens)), adapter))
        self.lines.note(line, 0, tokens)

    def after_first(self, line: int, token: int, adapter: int = 0) -> Array:
        """Feeds a line's first token; returns the prediction after it, as `feed`."""
        answer = self.device.run(self.lines.first(line, token, adapter))
        self.lines.note(line, 0, (token,))
        return answer[0][:1]

    def _prefill(self, row: PrefillRow) -> RowFailed | None:
        """Encodes a prompt or its continuation.

        Feeds a continuation in windows if one step suffices or the whole exceeds the context buckets; else encodes all
        again.
        """
        end, place = row.start + len(row.tokens), self._adapters.place(row.adapter)
        try:
            self.lines.check(row.slot, row.start, len(row.tokens), place)
        except LineError as error:
            return RowFailed(str(error))
        if row.start and (len(row.tokens) <= self.layout.width or end > self.layout.chunks[-1]):
            (outputs,) = self.feed([PrefillRow(row.slot, row.start, row.tokens, place)])
            return outputs if isinstance(outputs, RowFailed) else None
        self.encode(row.slot, [*self.lines.held[row.slot][: row.start], *row.tokens], place)
        return None

    def _verify_row(self, row: VerifyRow, outputs: Array) -> Verdict | RowFailed:
        if not self.tokens_only:
            return verdict_or_failure(functools.partial(verify_row, row, lambda i: outputs[i]))
        return agree(row.draft, lambda i: int(outputs[i]))

    def _draw(self, row: ProposeRow, outputs: Any, tokens: list[int], sent: list[SparseDistribution]) -> None:
        """Appends the next draft token; with tokens_only it has no distribution."""
        if self.tokens_only:
            tokens.append(int(outputs))
            return
        token, drawn_from = draft_next(row, outputs, tokens)
        tokens.append(token)
        sent += [drawn_from] if drawn_from else []


def _next_feed(row: ProposeRow, drafted: list[int]) -> PrefillRow:
    if drafted:
        return PrefillRow(row.slot, row.position + len(drafted), (drafted[-1],))
    return PrefillRow(row.slot, row.position + 1 - len(row.tail), row.tail)


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
        runner = self.runner
        rows = {slot: (int(at), tuple(ids)) for slot, at, ids in zip(slots, starts, tokens.tolist(), strict=True)}
        if not head:
            room = runner.layout.capacity - runner.layout.span
            failed = runner.prefill([PrefillRow(slot, at, ids[: room - at]) for slot, (at, ids) in rows.items()])
            if failure := next(filter(None, failed), None):
                raise failure
            return torch.empty(0)
        runner.shapes = replace(runner.shapes, lengths=() if length is None else (length,))
        outputs = runner.step(rows)
        return torch.stack([torch.tensor(outputs[slot]) for slot in slots])

    def tensor(self, values: Sequence[Sequence[int]] | Sequence[int]) -> Tensor:
        return torch.tensor(values)
