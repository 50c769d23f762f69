"""Checks batch invariance on this device, with these weights and threads, before a server is ready.

A token's logits must be bit-identical in every width, row and batch, and after prefill. Kernels choose their order of
summation by shape, not by data, so one sequence checks a shape. If shapes differ (cuBLAS, float16), only the widest
window at the full batch over the whole cache stays in use; if `exact` is false, all do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tandem.runners.protocol import Limits, StepShapes

if TYPE_CHECKING:
    from tandem.runners.torch.graph_runner import FusedGraph

Array = Any  # logits: a torch tensor or numpy array
DEEPEST = 1024  # positions that the check fills at most


class ShapedModel(Protocol):
    """The model under check, like TorchModel."""

    device: str
    vocab_size: int

    def forward(
        self, slots: Sequence[int], tokens: Array, starts: Array, length: int | None = None, head: bool = True
    ) -> Array:
        """Logits [rows, width, vocabulary] of tokens [rows, width] at positions starts [rows]."""

    def tensor(self, values: Sequence[Sequence[int]] | Sequence[int]) -> Array:
        """Integers [n] or [n, m] on the device."""


def check_batch_invariance(
    model: ShapedModel,
    limits: Limits,
    widths: tuple[int, ...],
    batches: tuple[int, ...],
    lengths: tuple[int, ...] = (),
    chunks: tuple[int, ...] = (),
    exact: bool = True,
    graphs: bool = False,
) -> StepShapes:
    """Returns the shapes whose bits agree, else the only one that steps may use.

    `graphs`: a prefill gives no logits, so what it wrote is compared with what decoding writes.
    """
    probe = _Probe(model, limits, widths[-1])
    end, only = min(limits.max_length, DEEPEST), (widths[-1], batches[-1])
    windows = [(width, batch) for batch in batches for width in widths]
    deep = [] if graphs else [(limits.chunk, 1)]
    reference = probe.stepwise(*only)
    agreeing = [window for window in windows if probe.agrees(reference, *window)]
    rebuilt = probe.rebuilt(limits.chunk, reference, *only) and (not graphs or probe.refilled(end, *only))
    if not rebuilt or len(agreeing) < len(windows) or not probe.same_at(end, [*windows, *deep]):
        if not exact:
            return StepShapes(widths, batches, False, lengths, tuple(sorted({*chunks, limits.chunk})), lengths)
        alone = rebuilt and only in agreeing and (graphs or probe.same_at(end, [only, *deep]))
        return StepShapes((only[0],), (only[1],), alone, chunks=(limits.chunk,))
    good_chunks = (*sorted(c for c in chunks if c < limits.chunk and probe.rebuilt(c, reference, *only)), limits.chunk)
    prefills = [(c, 1) for c in good_chunks]
    probe.fill(max(lengths, default=0))
    deepest_first = sorted(lengths, reverse=True)  # windows at one's end leave the shorter ones' prefix alone
    good = [sorted(n for n in deepest_first if probe.agree_at(n, n, kind)) for kind in (windows, prefills)]
    return StepShapes(widths, batches, True, tuple(good[0]), good_chunks, tuple(good[1]))


def check_fused_invariance(fused: FusedGraph, limits: Limits, shapes: StepShapes) -> bool:
    """Whether each fused graph's logits equal those of verifying its drafts."""
    width, batch = shapes.widths[-1], shapes.batches[-1]
    probe = _Probe(fused.target, limits, width)
    for rows, k in fused.shapes:
        logits, drafts = fused.probe(int(probe.tokens[probe.start]), probe.start, rows, k)
        verified = [probe.drafted(probe.start, row, width, batch) for row in drafts]
        if not all(same_bits(a[: k + 1], b[: k + 1]) for a, b in zip(logits, verified, strict=True)):
            return False
    return True


def same_bits(a: Array, b: Array) -> bool:
    """Whether all numbers are equal; a NaN never is."""
    return bool((a == b).all())


class _Probe:
    def __init__(self, model: ShapedModel, limits: Limits, widest: int) -> None:
        self.model, self.limits = model, limits
        self.count = min(widest + 1, limits.max_length // 2)
        self.start = min(limits.chunk, limits.max_length - self.count)
        chance = np.random.default_rng(0)
        self.tokens: list[int] = chance.integers(0, model.vocab_size, limits.max_length + widest).tolist()
        self.noise: list[int] = chance.integers(0, model.vocab_size, max(widest, limits.chunk)).tolist()
        for slot in range(limits.slots):
            self._prefill(slot, 0, self.start, limits.chunk)

    def stepwise(self, width: int, batch: int) -> list[Array]:
        """Logits [count, vocabulary] of plain decoding: each token in column 0 of row 0."""
        return [self._window(self.start + i, 1, width, batch)[0, 0] for i in range(self.count)]

    def agrees(self, reference: Sequence[Array], width: int, batch: int) -> bool:
        """Whether a window has the bits of `reference` [count, vocabulary] in every column and row."""
        used = min(width, self.count)
        logits = self._window(self.start, used, width, batch)
        return all(same_bits(row[i], reference[i]) for row in logits for i in range(used))

    def rebuilt(self, chunk: int, reference: Sequence[Array], width: int, batch: int) -> bool:
        """Whether the last token has the reference's bits after a prefill in such chunks."""
        last = self.start + self.count - 1
        self._prefill(self.limits.slots - 1, 0, last, chunk)
        return same_bits(self._window(last, 1, width, batch)[0, 0], reference[-1])

    def same_at(self, end: int, shapes: list[tuple[int, int]]) -> bool:
        self.fill(end)
        return self.agree_at(end, None, shapes)

    def fill(self, end: int) -> None:
        self._prefill(self.limits.slots - 1, 0, end, self.limits.chunk)

    def agree_at(self, end: int, length: int | None, shapes: list[tuple[int, int]]) -> bool:
        """Whether windows (width, batch) ending at `end` that read `length` positions agree with one that reads all."""
        widest = max(width for width, _ in shapes)
        whole = self._window(end - widest, widest, widest, 1)[0]
        return all(
            same_bits(self._window(end - width, width, width, batch, length)[0], whole[widest - width :])
            for width, batch in shapes
        )

    def refilled(self, end: int, width: int, batch: int) -> bool:
        """Whether a window before `end` keeps its bits when the chunk before it is decoded again."""
        slot, decoded = self.limits.slots - 1, max(0, end - width - self.limits.chunk)
        self._prefill(slot, 0, end - width, self.limits.chunk)
        prefilled = self._window(end - width, width, width, batch)[0]
        for at in range(decoded, end - width, width):
            self._window(at, width, width, batch)
        return same_bits(self._window(end - width, width, width, batch)[0], prefilled)

    def drafted(self, position: int, drafts: list[int], width: int, batch: int) -> Array:
        """Logits [width, vocabulary] of the token at `position` and drafts."""
        window = [self.tokens[position], *drafts]
        return self._rows(position, (window + window[-1:] * width)[:width], batch)[0]

    def _window(self, start: int, used: int, width: int, batch: int, length: int | None = None) -> Array:
        """Feeds tokens[start : start + used] padded to `width` in `batch` rows, last slot first."""
        return self._rows(start, self.tokens[start : start + used] + self.noise[: width - used], batch, length)

    def _rows(self, start: int, tokens: list[int], batch: int, length: int | None = None) -> Array:
        slots = list(range(self.limits.slots))[::-1][:batch]
        rows, starts = self.model.tensor([tokens] * batch), self.model.tensor([start] * batch)
        return self.model.forward(slots, rows, starts, length)

    def _prefill(self, slot: int, start: int, end: int, chunk: int) -> None:
        for at in range(start, end, chunk):
            part = self.tokens[at : min(at + chunk, end)]
            padded = self.model.tensor([part + self.noise[: chunk - len(part)]])
            self.model.forward([slot], padded, self.model.tensor([at]), head=False)
