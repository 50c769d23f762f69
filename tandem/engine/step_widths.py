"""Cuts the drafts of a step's rows to the lengths with which the step commits most tokens per second."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

from tandem.runners.protocol import FusedResult, FusedRow, FusedStep
from tandem.speculation.estimate import LEAST_GAIN, Line

ROUNDS = 3  # of the rate, which prices a token's seconds and follows from the lengths
MARGIN = 1.2  # worth over price that a draft token needs, because estimates of acceptance err


class StepWidths:
    """Steps of one pair; measures seconds of verifications by rows and tokens, of drafts by draft tokens.

    `resting`: the model's drafts did not pay in the last step, so rows need not prepare any, only name their worth.
    """

    def __init__(self, step: FusedStep) -> None:
        self._step, self._verify, self._draft = step, Line(0.1), Line(1.0)
        self.resting = False

    def run(self, rows: Sequence[Any]) -> Sequence[Any]:
        """Runs rows, and chunks after them, with the drafts that pay; on the device's thread."""
        count = sum(isinstance(row, FusedRow) for row in rows)
        rows = [*self.cut(rows[:count]), *rows[count:]]
        began = time.perf_counter()
        results = self._step(rows)
        found = [result for result in results if isinstance(result, FusedResult)]
        if len(found) == len(rows):
            self._note(rows, found, time.perf_counter() - began)
        return results

    def _note(self, rows: Sequence[FusedRow], results: Sequence[FusedResult], seconds: float) -> None:
        drafted = [0 if row.copied else len(r.proposal.token_ids) for row, r in zip(rows, results, strict=True)]
        drafting = results[0].draft_seconds
        self._verify.note(2 * len(rows) + sum(len(result.proposal.token_ids) for result in results), seconds - drafting)
        if any(drafted):
            self._draft.note(sum(drafted), drafting)

    def cut(self, rows: Sequence[FusedRow]) -> list[FusedRow]:
        """Shortens drafts of known worth; with one row, its plan is the step's."""
        self.resting = False
        if len(rows) < 2 or not (self._verify.known and self._draft.known):
            return list(rows)
        copies, both = self._lengths(rows, drafts=False), self._lengths(rows, drafts=True)
        self.resting = both[0] <= LEAST_GAIN * copies[0]
        _, lengths = copies if self.resting else both
        return [row.cut(length) if row.worth else row for row, length in zip(rows, lengths, strict=True)]

    def _lengths(self, rows: Sequence[FusedRow], drafts: bool) -> tuple[float, list[int]]:
        """Returns tokens per second, and lengths: of copies, and of the model's `drafts`."""
        plain, token = self._verify.at(2 * len(rows)), self._verify.slope
        rate, lengths = len(rows) / plain, [0] * len(rows)
        for _ in range(ROUNDS):
            before = lengths
            lengths = [
                sum(1 for _ in itertools.takewhile(price.__lt__, row.worth)) if row.copied or drafts else 0
                for row in rows
                for price in [MARGIN * rate * (token if row.copied else token + self._draft.slope)]
            ]
            if lengths == before:
                break
            drafted = sum(n for row, n in zip(rows, lengths, strict=True) if not row.copied)
            seconds = plain + token * sum(lengths) + (self._draft.at(drafted) if drafted else 0.0)
            rate = (len(rows) + sum(sum(row.worth[:n]) for row, n in zip(rows, lengths, strict=True))) / seconds
        return rate, lengths
