"""A toy EAGLE head: an oracle for features; wrong, stale or missing ones show as rejected drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tandem.runners.capabilities import UNABLE, Capabilities, FeaturesIn, Trait
from tandem.runners.protocol import (
    Limits,
    PrefillRow,
    Proposal,
    ProposeRow,
    RowFailed,
    RunnerIdentity,
    VerifyRow,
    draft_next,
)
from tandem.speculation.features import FeatureInbox
from tandem.speculation.types import SparseDistribution, Verdict
from tests.toy import HIDDEN, ToyConfig, ToyRunner, digest_logits, toy_digest, toy_digests


class ToyHead(ToyRunner):
    """Reads three layers, in its own order, from inboxes, or next to a `target` from its digests."""

    layers = (3, 1, 2)

    def __init__(self, limits: Limits, config: ToyConfig, target: ToyRunner | None = None) -> None:
        super().__init__(limits, config)
        self._inboxes: dict[int, FeatureInbox] | None = {}
        if target is not None:
            target.hands_out, self.digests, self._inboxes = True, target.digests, None
        self._first, self._end = [0] * limits.slots, [0] * limits.slots
        self._rows = np.zeros(self.digests.shape, dtype=np.int64)  # what it cached; negative where that was a guess
        self._own = np.zeros_like(self.digests)
        self._drafted = np.full(self.digests.shape, -1, dtype=np.int64)

    @property
    def capabilities(self) -> Capabilities:
        reads = UNABLE if self._inboxes is None else FeaturesIn(self.layers, HIDDEN, "", self.follow)
        own, memory = frozenset({Trait.HEAD}), super().capabilities.memory_on_demand
        return Capabilities(own, features_in=reads, memory_on_demand=memory, reprocess_accepted=True)

    @property
    def identity(self) -> RunnerIdentity:
        return replace(super().identity, model_name="toy-head")

    def follow(self, slot: int, inbox: FeatureInbox) -> None:
        assert self._inboxes is not None
        self._inboxes[slot] = inbox

    def prefill(self, rows: Sequence[PrefillRow]) -> list[RowFailed | None]:
        self.work()
        for row in rows:
            self._take(row.slot, row.start + len(row.tokens) - 1)
            self._feed(row.slot, row.start, row.tokens)
        return [None] * len(rows)

    def verify(self, rows: Sequence[VerifyRow]) -> list[Verdict | RowFailed]:
        raise NotImplementedError("an EAGLE head drafts and verifies nothing")

    def _take(self, slot: int, committed: int) -> None:
        if self._inboxes is None:
            self._first[slot], self._end[slot] = -1, committed  # before the first token there is no feature to miss
            return
        inbox = self._inboxes[slot]
        self._first[slot], self._end[slot] = inbox.seen
        for start, values in inbox.take():
            self.digests[slot, start : start + len(values)] = toy_digests(values, self.layers)

    def _propose(self, row: ProposeRow) -> Proposal:
        self._take(row.slot, row.position)
        self._feed(row.slot, row.position + 1 - len(row.tail), row.tail)
        whole, proposed = self._whole(row.slot, row.position), list[int]()
        distributions: list[SparseDistribution] = []
        for i in range(row.k):
            if i:
                self._feed(row.slot, row.position + i, proposed[-1:])
            logits = digest_logits(int(self._own[row.slot, row.position + i]), self.config)
            token, distribution = draft_next(row, logits if whole else np.roll(logits, 1), proposed)
            distributions += [distribution] if distribution is not None else []
            proposed.append(token)
            self._drafted[row.slot, row.position + i + 1] = token
        return Proposal(tuple(proposed), distributions=tuple(distributions))

    def _whole(self, slot: int, position: int) -> bool:
        """Whether all tokens from the first feature up to `position` were fed with their features."""
        first, end = self._first[slot], self._end[slot]
        fed, known = self._rows[slot], slice(first + 1, min(end, position))
        return bool((fed[known] == self.digests[slot, known]).all()) and (end > position or fed[end] >= 0)

    def _feed(self, slot: int, start: int, tokens: Sequence[int]) -> None:
        for position, token in enumerate(tokens, start):
            come = self._first[slot] <= position - 1 < self._end[slot]
            before = int((self.digests if come else self._own)[slot, position - 1]) if position else 0
            guessed = come or token == self._drafted[slot, position]
            digest = self._own[slot, position] = toy_digest((token,), before if guessed else ~before & 0xFFFFFFFF)
            self._rows[slot, position] = digest if come else ~int(digest)
