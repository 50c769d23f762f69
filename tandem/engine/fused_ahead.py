"""Makes the row of a fused round from the result of the one before, on the device thread."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tandem.engine.model_drafter import DraftSequence
from tandem.engine.sequences import TargetSequence
from tandem.runners.protocol import TAIL, FusedResult, FusedRow
from tandem.speculation.fallible import DrafterHealth
from tandem.speculation.length import LengthPlan
from tandem.speculation.lookup_policy import PolicedLookup
from tandem.speculation.types import model_part


@dataclass(slots=True)
class _Extended:
    """The tokens that the device's last row extends, and how many of them the draft model's cache lacks."""

    tokens: list[int]
    missing: int


class RoundsAhead:
    """Follows one request up to a token of `stops`, or until there are `end` tokens.

    Rounds begin by themselves with the lengths of `plan`, until the event loop asks for another round than the device
    thread began; a plan that does not last serves one round.
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
        self.plan: LengthPlan | None = None
        self._last = _Extended([], 0)

    def begin(self, tokens: Sequence[int]) -> None:
        """Says which tokens the row that the event loop asks for extends."""
        self._last = _Extended(list(tokens), len(tokens) - self.draft.truncate_to(tokens))

    def foreseen(self, tokens: Sequence[int]) -> FusedRow | None:
        """Returns the row after `tokens` if the device thread has begun it; otherwise drops the plan."""
        row = self._target.foreseen
        if row and (row.propose.position, row.propose.tail[-1]) == (len(tokens) - 1, tokens[-1]):
            return row
        self.plan = None
        return None

    def follow(self, row: FusedRow, result: object) -> FusedRow | None:
        """Returns the row of the next round; None if the event loop must look at the result first."""
        plan, last = self.plan, self._last
        if plan is None or not isinstance(result, FusedResult) or result.draft_failed:
            return None
        if not plan.lasts:
            self.plan = None
        new, tokens, drafted = result.verdict.token_ids, last.tokens, row.propose.k and not row.copied
        tokens += new
        if drafted:
            kept = len(result.proposal.token_ids) - 1 if self.draft.keeps_drafts else 0
            last.missing = len(new) - max(0, min(result.verdict.accepted, kept))
        else:
            last.missing += len(new)
        if len(tokens) >= self._end or not set(new).isdisjoint(self._stops):
            return None
        k = min(plan.k, self._end - len(tokens) - 1)
        copied = self._lookup.copy(tokens, k).token_ids if self._lookup and k else ()
        k = model_part(k, plan.model_k) if copied else self.draft.room(tokens, model_part(k, plan.model_k))
        if not k or copied:
            return FusedRow(self._target.undrafted(tokens, k if copied else 0), copied, self._target.adapter)
        readable = max(tokens[-last.missing :]) < self.draft.engine.runner.limits.vocab_size
        if not readable or last.missing > TAIL or not self._health.up:
            return None
        asked = self.draft.row(tokens, k, last.missing)
        return FusedRow(asked, (), self._target.adapter) if asked else None
