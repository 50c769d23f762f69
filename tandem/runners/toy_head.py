"""A toy EAGLE head: an oracle for how features are handed out, taken, and fed again.

A feature is the target's digest of all tokens up to a position. With the right features and a whole cache the head
knows the target's logits, so that a wrong, stale or missing one shows as rejected drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tandem.runners.protocol import (
    PrefillRow,
    Proposal,
    ProposeRow,
    RowFailed,
    RunnerIdentity,
    VerifyRow,
    draft_next,
)
from tandem.runners.toy import ToyConfig, ToyRunner, digest_logits, toy_digest
from tandem.speculation.types import SparseDistribution, Verdict


class ToyHead(ToyRunner):
    """Drafts from the digests of `target`, in the slots of the same numbers."""

    def __init__(self, target: ToyRunner, config: ToyConfig) -> None:
        super().__init__(target.limits, config)
        self._target = target
        target.hands_out = True
        self._rows = np.zeros_like(target.digests)  # what the head cached for each token

    @property
    def identity(self) -> RunnerIdentity:
        return replace(super().identity, model_name="toy-head", refeeds=True)

    @property
    def page_bytes(self) -> int:
        """0: its rows are soon made again from the features in its target's pages."""
        return 0

    def prefill(self, rows: Sequence[PrefillRow]) -> list[RowFailed | None]:
        self._work()
        for row in rows:
            self._feed(row.slot, row.start, row.tokens)
        return [None] * len(rows)

    def verify(self, rows: Sequence[VerifyRow]) -> list[Verdict | RowFailed]:
        raise NotImplementedError("an EAGLE head drafts and verifies nothing")

    def _propose(self, row: ProposeRow) -> Proposal:
        self._feed(row.slot, row.position + 1 - len(row.tail), row.tail)
        before = slice(0, row.position)
        whole = bool((self._rows[row.slot, before] == self._target.digests[row.slot, before]).all())
        digest = int(self._rows[row.slot, row.position])
        proposed: list[int] = []
        distributions: list[SparseDistribution] = []
        for i in range(row.k):
            if i:  # its own guess of a feature: not the target's, so this row has to be fed again
                digest = toy_digest(proposed[-1:], digest)
                self._rows[row.slot, row.position + i] = ~np.uint32(digest)
            logits = digest_logits(digest, self.config)
            token, distribution = draft_next(row, logits if whole else np.roll(logits, 1), proposed)
            distributions += [distribution] if distribution is not None else []
            proposed.append(token)
        return Proposal(tuple(proposed), distributions=tuple(distributions))

    def _feed(self, slot: int, start: int, tokens: Sequence[int]) -> None:
        """Caches `tokens`, each with the target's feature of the position before it."""
        for position, token in enumerate(tokens, start):
            feature = int(self._target.digests[slot, position - 1]) if position else 0
            self._rows[slot, position] = toy_digest((token,), feature)
