"""What a head away from its target is made from, and the room for features that come to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.runners.capabilities import FeaturesIn
from tandem.runners.eagle.hidden_states import TargetFeatures
from tandem.runners.eagle.module import EagleHead
from tandem.runners.protocol import Limits, RunnerIdentity
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

    def reads(self, follow: Callable[[int, FeatureInbox], None]) -> FeaturesIn:
        """What it reads, where `follow` is told where that comes."""
        return FeaturesIn(self.layers, self.head.config.target_hidden_size, self.weights_revision_read, follow)

    def features(self, embedding: Tensor, like: Tensor) -> TargetFeatures:
        """Room for the features that come, in the dtype and on the device of `like`."""
        shape = (self.limits.slots, self.length, len(self.layers) * self.head.config.target_hidden_size)
        return TargetFeatures(torch.zeros(shape, dtype=like.dtype, device=like.device), embedding)
