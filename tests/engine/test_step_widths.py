"""Drafts of a step's rows, cut where the step commits most tokens per second, on a device of known step times."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from tandem.engine import step_widths
from tandem.engine.step_widths import StepWidths
from tandem.runners.protocol import FusedResult, FusedRow, PrefillRow, Proposal, ProposeRow
from tandem.speculation.types import Request, Verdict
from tests.support import GREEDY


class Device:
    """Verifies within 5 ms, and 0.4 ms for each row and token; drafts within 1 ms, and 0.2 ms for each token."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.lengths = 0.0, list[int]()
        monkeypatch.setattr(step_widths.time, "perf_counter", lambda: self.now)

    def step(self, rows: Sequence[FusedRow | PrefillRow]) -> list[FusedResult | None]:
        fused = [row for row in rows if isinstance(row, FusedRow)]
        self.lengths = [len(row.copied) or row.propose.k for row in fused]
        drafting = drafted_ms(sum(row.propose.k for row in fused if not row.copied)) / 1e3
        chunks = 20 * (len(rows) - len(fused))
        self.now += drafting + (verified_ms(len(fused), sum(self.lengths)) + chunks) / 1e3
        results = [FusedResult(Proposal((1,) * n), Verdict((1,), 0), drafting) for n in self.lengths]
        return [*results, *[None] * (len(rows) - len(fused))]


def verified_ms(rows: int, drafts: int) -> float:
    return 5 + 0.4 * (2 * rows + drafts)


def drafted_ms(drafts: int) -> float:
    return 1 + 0.2 * drafts if drafts else 0.0


def row(worth: Sequence[float], copied: bool = False, known: bool = True) -> FusedRow:
    k = len(worth)
    return FusedRow(ProposeRow(0, 9, (1,), k, Request(GREEDY)), (1,) * k * copied, worth=tuple(worth) if known else ())


def rate(rows: Sequence[FusedRow], lengths: Sequence[int]) -> float:
    tokens = len(rows) + sum(sum(row.worth[:n]) for row, n in zip(rows, lengths, strict=True))
    drafted = sum(n for row, n in zip(rows, lengths, strict=True) if not row.copied)
    return tokens / (verified_ms(len(rows), sum(lengths)) + drafted_ms(drafted))


def measured(device: Device) -> StepWidths:
    """Widths that have measured steps of many sizes, chunks beside some."""
    widths, chance = StepWidths(device.step), random.Random(1)
    for _ in range(200):
        rows = [
            row([0.5] * chance.randrange(6), chance.random() < 0.3, known=False) for _ in range(chance.randint(1, 8))
        ]
        widths.run([*rows, *[PrefillRow(0, 0, (1,) * 60)] * chance.randrange(2)])
    return widths


def test_a_step_verifies_the_drafts_with_which_it_commits_most_tokens_per_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, chance = Device(monkeypatch), random.Random(2)
    widths, cut = measured(device), 0
    for _ in range(60):
        accepted = [chance.uniform(0.1, 0.95) for _ in range(chance.randint(2, 5))]
        rows = [row([p**i for i in range(1, 4)], chance.random() < 0.3) for p in accepted]
        widths.run(rows)
        best = max(rate(rows, lengths) for lengths in itertools.product(range(4), repeat=len(rows)))
        assert rate(rows, device.lengths) > 0.95 * best, (accepted, device.lengths)
        cut += sum(device.lengths) < 3 * len(rows)
    assert cut


def test_trials_fixed_lengths_and_a_row_alone_are_verified_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    widths = measured(device)
    widths.run([row([0.01] * 3)])
    assert device.lengths == [3]
    widths.run([*[row([0.01] * 4, known=False)] * 2, *[row([0.01] * 4)] * 8, PrefillRow(0, 0, (1,) * 60)])
    assert device.lengths == [4, 4, *[0] * 8]
