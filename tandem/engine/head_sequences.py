"""Sequences of an EAGLE head whose remote target sends features with its verdicts."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.engine.engine import Engine
from tandem.engine.model_drafter import DraftSequence
from tandem.runners.capabilities import No
from tandem.runners.protocol import TAIL, ProposeRow
from tandem.speculation.features import FeatureInbox
from tandem.speculation.types import Request


class HeadSequence(DraftSequence):
    """A head's sequence, with features from `inbox`; until they come, the head's own states replace them."""

    def __init__(
        self, inbox: FeatureInbox, engine: Engine, slot: int, request: Request, target_vocab_size: int
    ) -> None:
        super().__init__(engine, slot, request, target_vocab_size)
        reads = engine.can.features_in
        assert not isinstance(reads, No), "only heads have inboxes"
        reads.follow(slot, inbox)
        self._inbox, self._epoch, self._sound, self._known = inbox, inbox.epoch, 0, 0
        self.keeps_drafts = True

    async def fill(self, tokens: Sequence[int]) -> int:
        """Like KVSequence.fill, as far as features have come."""
        self._forget_guesses()
        if len(self.held) <= self._inbox.first:
            self.held = list(tokens[: self._inbox.first + 1])
        known = self._known_rows()
        await super().fill(tokens[:known])
        self._sound = len(self.held)
        return 0

    def lacks(self, tokens: Sequence[int]) -> bool:
        if not self._inbox.handed_out:
            return False
        if self._known_rows() > self._sound or self._epoch != self._inbox.epoch:
            self._forget_guesses()
        self._sound = min(self._sound, self.truncate_to(tokens))
        return len(tokens) - len(self.held) > TAIL or len(self.held) <= self._inbox.first

    def row(self, tokens: Sequence[int], k: int, missing: int | None = None) -> ProposeRow | None:
        """Like DraftSequence.row; None if too many features are missing."""
        if not self._inbox.handed_out:
            return None
        self._known = self._known_rows()
        if len(tokens) - len(self.held) > self.engine.runner.limits.chunk or len(tokens) <= self._inbox.first + 1:
            return None
        return super().row(tokens, k, missing)

    def proposed(self, tokens: Sequence[int], draft: Sequence[int]) -> None:
        super().proposed(tokens, draft)
        self._sound = min(self._known, len(tokens))

    def _forget_guesses(self) -> None:
        # after a gap in the features, everything is fed again
        if self._epoch != self._inbox.epoch:
            self._epoch, self._sound = self._inbox.epoch, 0
        del self.held[self._sound :]

    def _known_rows(self) -> int:
        """Number of tokens, from the start, with features."""
        return self._inbox.look() + 1
