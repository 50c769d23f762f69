"""Makes the row of a fused round from the result of the one before, on the device thread."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tandem.engine.model_drafter import DraftSequence
from tandem.engine.sequences import TargetSequence
from tandem.runners.protocol import TAIL, FusedResult, FusedRow
from tandem.speculation.fallible import DrafterHealth
from tandem.speculation.lookup_policy import PolicedLookup
from tandem.speculation.types import model_part


class RoundsAhead:
    """Follows one request up to a token of `stops`, or until there are `end` tokens.

    A round begins by itself if its lengths are known by `plan` when the one before ends. From the plan to that end the
    device thread alone uses the lookup, and the event loop the rest of the time.
    """

    def __init__(
        self,
        target: TargetSequence,
        draft: DraftSequence,
        lookup: PolicedLookup | None,
        health: DrafterHealth,
        stops: Collection[int],
        end: int,
    ) -> None:
        self._target, self.draft, self._lookup, self._health = target, draft, lookup, health
        self._stops, self._end = stops, end
        self.plan: tuple[int, int | None] | None = None
        self._tokens, self._missing = list[int](), 0  # at the device's last row; `_missing`: in the draft model's cache

    def begin(self, tokens: Sequence[int]) -> None:
        """Says which tokens the row that the event loop asks for extends."""
        self._tokens, self._missing = list(tokens), len(tokens) - self.draft.truncate_to(tokens)

    def foreseen(self, tokens: Sequence[int]) -> FusedRow | None:
        """Returns the row after `tokens` if the device thread has begun it; nothing is planned any more."""
        self.plan, row = None, self._target.foreseen
        fits = row and (row.propose.position, row.propose.tail[-1]) == (len(tokens) - 1, tokens[-1])
        return row if fits else None

    def follow(self, row: FusedRow, result: object) -> FusedRow | None:
        """Returns the row of the next round; None if the event loop must look at the result first."""
        plan, self.plan = self.plan, None
        if plan is None or not isinstance(result, FusedResult) or result.draft_failed:
            return None
        new, tokens, drafted = result.verdict.token_ids, self._tokens, row.propose.k and not row.copied
        tokens += new
        if drafted:
            kept = len(result.proposal.token_ids) - 1 if self.draft.keeps_drafts else 0
            self._missing = len(new) - max(0, min(result.verdict.accepted, kept))
        else:
            self._missing += len(new)
        if len(tokens) >= self._end or not set(new).isdisjoint(self._stops):
            return None
        k = min(plan[0], self._end - len(tokens) - 1)
        copied = self._lookup.copy(tokens, k).token_ids if self._lookup and k else ()
        k = model_part(k, plan[1])
        if not k or copied:
            return FusedRow(self._target.undrafted(tokens, k if copied else 0), copied, self._target.adapter)
        readable = max(tokens[-self._missing :]) < self.draft.engine.runner.limits.vocab_size
        if not readable or self._missing > TAIL or not self._health.up:
            return None
        asked = self.draft.row(tokens, k, self._missing)
        return FusedRow(asked, (), self._target.adapter) if asked else None
