"""Runs native steps of a head away from its target: features come by inbox, its own states take the place of others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.runners.eagle.remote import RemoteHead
from tandem.runners.native.head import NativeHead, NativeHeadRunner
from tandem.runners.native.library import RowBatch
from tandem.runners.protocol import PrefillRow, ProposeRow, RunnerIdentity
from tandem.speculation.features import FeatureInbox


class RemoteNativeHeadRunner(NativeHeadRunner):
    """Implements TakesFeatures, as RemoteEagleRunner does. The model keeps its own states of whole slots.

    For the steps, positions count from that of a slot's first feature: the head sees nothing before it, and its rotary
    embedding is of distances alone.
    """

    def __init__(self, model: NativeHead, made: RemoteHead, identity: RunnerIdentity) -> None:
        super().__init__(model, made.limits, identity, verifies=False)
        self.layers, self.target_hidden_size = made.layers, made.head.config.target_hidden_size
        self.weights_revision_read = made.weights_revision_read
        self._values = model.features.values
        self._inboxes: dict[int, FeatureInbox] = {}
        self._seen: dict[int, tuple[int, int]] = {}

    @property
    def reserved_whole(self) -> str:
        return "they hold its target's features"

    def follow(self, slot: int, inbox: FeatureInbox) -> None:
        self._inboxes[slot] = inbox
        self._seen.pop(slot, None)

    def _batch(
        self, rows: Sequence[PrefillRow] | Sequence[ProposeRow], starts: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> RowBatch:
        slots = [row.slot for row in rows]
        seen = [self._take(slot) for slot in slots]
        begins = [
            min(max(first - start, 0), len(fed) - 1)
            for (first, _), start, fed in zip(seen, starts, tokens, strict=True)
        ]
        own = [max(start - first, 0) for (first, _), start in zip(seen, starts, strict=True)]
        fed = [each[begin:] for each, begin in zip(tokens, begins, strict=True)]
        return RowBatch(slots, own, fed, knowns=[end - first for first, end in seen])

    def _take(self, slot: int) -> tuple[int, int]:
        """Stores the features that have come for a slot; returns from where to where the next step reads them."""
        inbox = self._inboxes.get(slot)
        if inbox is None:
            return 0, 0
        (first, end), values = inbox.seen, self._values[slot]
        behind = first - self._seen.get(slot, (first, end))[0]
        if behind:  # those before a gap go
            values[: len(values) - behind] = values[behind:].clone()
        for start, came in inbox.take():
            found = torch.from_numpy(came[max(0, first - start) :])
            at = max(0, start - first)
            values[at : at + len(found)] = found[: max(0, len(values) - at)]
        self._seen[slot] = first, end
        return first, end
