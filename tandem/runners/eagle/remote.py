"""The parts of a head apart from its target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tandem.checkpoints.head_config import HeadWeights
from tandem.checkpoints.numbers import Stored
from tandem.runners.capabilities import FeaturesIn
from tandem.runners.protocol import Limits, RunnerIdentity
from tandem.speculation.features import FeatureInbox


@dataclass(frozen=True, slots=True)
class RemoteHead:
    """embedding [vocabulary, hidden]: the head's own, or of the target of `weights_revision_read`."""

    head: HeadWeights
    layers: tuple[int, ...]
    embedding: Stored
    limits: Limits
    identity: RunnerIdentity
    weights_revision_read: str

    @property
    def length(self) -> int:
        """Positions of a slot, drafts included."""
        return self.limits.max_length + self.limits.max_draft + 1

    @property
    def features_shape(self) -> tuple[int, int, int]:
        """Slots, positions, numbers."""
        return self.limits.slots, self.length, len(self.layers) * self.head.config.target_hidden_size

    def reads(self, follow: Callable[[int, FeatureInbox], None]) -> FeaturesIn:
        return FeaturesIn(self.layers, self.head.config.target_hidden_size, self.weights_revision_read, follow)
