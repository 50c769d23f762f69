"""Runs a head away from its target: features come by inbox, and until they do, its own states take their place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem.runners.eagle.features import TargetFeatures
from tandem.runners.eagle.module import EagleHead
from tandem.runners.eagle.runner import EagleRunner
from tandem.runners.protocol import Limits, PrefillRow, Proposal, ProposeRow, RowFailed, RunnerIdentity
from tandem.runners.torch.platforms import Platform
from tandem.speculation.features import FeatureInbox


@dataclass(frozen=True, slots=True)
class RemoteHead:
    """What a head away from its target is made from.

    embedding [vocabulary, hidden]: the head's own, or that of the target's weights of revision `weights_revision_read`.
    """

    head: EagleHead
    layers: tuple[int, ...]
    embedding: Tensor
    limits: Limits
    identity: RunnerIdentity
    weights_revision_read: str

    @property
    def length(self) -> int:
        """Positions of a slot, drafts included."""
        return self.limits.max_length + self.limits.max_draft + 1

    def features(self, embedding: Tensor, like: Tensor) -> TargetFeatures:
        """Room for the features that come, in the dtype and on the device of `like`."""
        shape = (self.limits.slots, self.length, len(self.layers) * self.head.config.target_hidden_size)
        return TargetFeatures(torch.zeros(shape, dtype=like.dtype, device=like.device), embedding)


class RemoteEagleRunner(EagleRunner):
    """Implements TakesFeatures. Of each slot it keeps the features that came, and the head's own states."""

    def __init__(self, made: RemoteHead, dtype: torch.dtype, platform: Platform) -> None:
        head, limits = made.head.to(device=platform.device, dtype=dtype), made.limits
        config, weight = head.config, head.fc.weight
        embedding = made.embedding.to(weight)
        super().__init__(head, made.features(embedding, weight), embedding, limits, made.identity, platform)
        self.layers, self.target_hidden_size = made.layers, config.target_hidden_size
        self.weights_revision_read = made.weights_revision_read
        self._own = weight.new_zeros(limits.slots, made.length, config.hidden_size)
        self._inboxes: dict[int, FeatureInbox] = {}
        self._firsts = torch.zeros(limits.slots, dtype=torch.int64, device=weight.device)
        self._ends = torch.zeros_like(self._firsts)
        self._seen_from = self._firsts[:0]

    def follow(self, slot: int, inbox: FeatureInbox) -> None:
        self._inboxes[slot] = inbox

    @torch.inference_mode()
    def prefill(self, rows: Sequence[PrefillRow]) -> list[RowFailed | None]:
        self._take([row.slot for row in rows])
        return super().prefill(rows)

    @torch.inference_mode()
    def propose(self, rows: Sequence[ProposeRow]) -> list[Proposal | RowFailed]:
        self._take([row.slot for row in rows])
        return super().propose(rows)

    def _take(self, slots: Sequence[int]) -> None:
        """Stores the features that have come for these slots."""
        for slot in slots:
            if inbox := self._inboxes.get(slot):
                for start, values in inbox.take():
                    found = torch.tensor(values[: max(0, self._own.shape[1] - start)]).to(self.features.values)
                    self.features.values[slot, start : start + len(found)] = found
                self._firsts[slot], self._ends[slot] = inbox.seen

    def _fused(self, slots: list[int], positions: Tensor) -> Tensor:
        """Like EagleRunner._fused; the head's own states where features have not come."""
        which, before = self._tensor(slots), (positions - 1).clamp(0, self._own.shape[1] - 1)
        come = (positions - 1 >= self._firsts[which][:, None]) & (positions - 1 < self._ends[which][:, None])
        come |= positions == 0  # no feature is before the first token, and no state
        return torch.where(come[..., None], super()._fused(slots, positions), self._own[which[:, None], before])

    def _step(self, slots: list[int], tokens: Tensor, hidden: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        which = self._tensor(slots)
        self._seen_from = self._firsts[which]
        stepped = super()._step(slots, tokens, hidden, positions, last)
        at = positions[torch.arange(len(slots), device=last.device), last]
        self._own[which, at.clamp(max=self._own.shape[1] - 1)] = stepped[:, 0]
        return stepped

    def _mask(self, at: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """Like EagleRunner._mask; nothing is seen up to the position of the first feature."""
        columns = torch.arange(length, device=at.device)[None]
        seen = (columns > self._seen_from[:, None]) | (at[:, None] == columns)
        unseen: Any = torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)[:, None, None]
        return torch.minimum(super()._mask(at, length, dtype), unseen)
