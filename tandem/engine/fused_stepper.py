"""Makes the rows of fused rounds."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tandem.engine.model_drafter import DraftSequence, Unreadable
from tandem.engine.sequences import TargetSequence
from tandem.engine.stepper import Step, Stepper
from tandem.runners.protocol import FusedResult, FusedRow, ProposeRow
from tandem.speculation.fallible import DrafterHealth
from tandem.speculation.length import LengthPlan
from tandem.speculation.lookup_policy import PolicedLookup
from tandem.speculation.types import model_part


class FusedStepper(Stepper):
    """Makes one request's rows until a token of `stops` (None: text may end it) or `end` tokens."""

    def __init__(
        self,
        step: Step,
        target: TargetSequence,
        draft: DraftSequence,
        lookup: PolicedLookup | None,
        health: DrafterHealth,
        tokens: Sequence[int],
        stops: Collection[int] | None,
        end: int,
    ) -> None:
        self._tokens = list(tokens)
        super().__init__(step, self._tokens)
        self.target, self.draft, self._lookup, self._health = target, draft, lookup, health
        self._end = end
        self._stops, self._ended = frozenset(stops or ()), stops is None
        self.asked: LengthPlan | None = None  # lengths of the event loop's row
        self.plan: LengthPlan | None = None  # of rows that the device begins; one that does not last serves one
        self.model_ready: bool | None = None  # set after `next_row` returned None: may the model draft for it?

    @property
    def self_paced(self) -> bool:
        return not self._ended

    def follow(self, row: FusedRow, result: FusedResult) -> None:
        new = result.verdict.token_ids
        if result.draft_failed:
            self.plan = None  # the event loop reports it first
        elif row.propose.k and not row.copied:
            self.draft.proposed(self.tokens, result.proposal.token_ids)
        self._tokens += new
        self._ended = self._ended or len(self.tokens) >= self._end or not self._stops.isdisjoint(new)

    def next_row(self) -> FusedRow | None:
        """Returns the next row; None without lengths, or if the draft model must catch up or is down."""
        lengths, tokens = self.asked or self.plan, self.tokens
        if lengths is None:
            return None
        k = min(lengths.k, self._end - len(tokens) - 1)
        looks_up = self._lookup and k > 0 and self.model_ready is None
        copied = self._lookup.copy(tokens, k).token_ids if self._lookup and looks_up else ()
        k = model_part(k, lengths.model_k) if copied else self.draft.room(tokens, model_part(k, lengths.model_k))
        if k and not copied and self.model_ready is not False:
            propose = self._propose_row(k)
        else:
            propose = self.target.verify_only_row(tokens, k if copied else 0)
        if propose is None:
            return None
        if self.asked is None and not lengths.lasts:
            self.plan = None
        self.asked = self.model_ready = None
        return FusedRow(propose, copied, self.target.adapter)

    def _propose_row(self, k: int) -> ProposeRow | None:
        try:
            able = (self._health.up or self.model_ready) and not self.draft.lacks(self.tokens)
        except Unreadable:
            able = False
        return self.draft.row(self.tokens, k) if able else None
