"""How the library draws tokens; draws draft tokens for it, by callback, if it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float
from typing import Any

from tandem.runners.native.library import DRAW, Drawing, Sampling, ints, pointer
from tandem.runners.native.steps import NativeSteps
from tandem.runners.protocol import FusedRow, ProposeRow, VerifyRow, draft_next
from tandem.speculation.draws import BadLogits
from tandem.speculation.rules import settled
from tandem.speculation.types import SparseDistribution


def sampled_rows(rows: Sequence[VerifyRow | ProposeRow | FusedRow], tokens: int) -> Any:
    """Sampling structures over `tokens` ids, from the position after each row's last; None: all greedy."""
    made = None
    for r, row in enumerate(rows):
        asked = row.propose if isinstance(row, FusedRow) else row
        by = asked.request.sampling
        if row.drawn and not by.greedy:
            made = made or (Sampling * len(rows))()
            top_k = min(by.top_k, tokens)
            made[r] = Sampling(by.temperature, by.top_p, by.min_p, by.seed, asked.position + 1, top_k, tokens)
    return made


class DraftDraws:
    """The draft tokens of one call; the library calls back on the calling thread."""

    def __init__(self, model: NativeSteps, rows: Sequence[ProposeRow]) -> None:
        self._model, self._rows = model, rows
        self._drafted: list[list[int]] = [[] for _ in rows]
        self._sent: list[list[SparseDistribution]] = [[] for _ in rows]
        self._error: Exception | None = None
        self._logits = model.room(len(rows))

    @classmethod
    def of(cls, model: NativeSteps, rows: Sequence[ProposeRow]) -> DraftDraws | None:
        """None if the library chooses all draft tokens itself."""
        return None if all(row.plain or not row.k for row in rows) else cls(model, rows)

    def passed(self) -> Drawing:
        # not kept, because it keeps this object alive
        others, model = ints([not row.drawn for row in self._rows]), self._model
        sampled = sampled_rows(self._rows, model.outputs if model.draft_vocab is None else model.vocab_size)
        return Drawing(others, sampled, pointer(self._logits, c_float), DRAW(self._draw))

    def finished(self) -> list[tuple[SparseDistribution, ...]]:
        """Each draft token's distribution, by row. Raises a draw's exception."""
        if self._error:
            raise self._error
        return [tuple(sent) for sent in self._sent]

    def _draw(self, row: int, at: int, best: int) -> int:
        # -1 ends the draft; the library would lose an exception
        if self._error:
            return -1
        try:
            token, drawn_from = self._next(row, at, best, self._drafted[row])
        except BadLogits:
            return -1  # the draft ends where its structure became too complex to follow
        except Exception as error:
            self._error = error
            return -1
        if token < 0:
            return token
        self._drafted[row].append(token)
        self._sent[row] += [drawn_from] if drawn_from else []
        return token

    def _next(self, index: int, at: int, best: int, drafted: Sequence[int]) -> tuple[int, SparseDistribution | None]:
        row = self._rows[index]
        if settled(best, row.request.sampling, row.processor, drafted):
            return best, None
        if row.request.sampling.greedy and row.processor and (mask := row.processor.mask(drafted)) is not None:
            return self._model.best_within(self._logits[at], mask), None
        return draft_next(row, self._model.widened(self._logits[at : at + 1])[0], drafted)
