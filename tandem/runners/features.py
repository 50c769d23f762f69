"""Protocols of features: a target's runner whose steps hand them out, and a head's runner that gets them by inbox."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tandem.speculation.features import FeatureInbox


@dataclass(frozen=True, slots=True)
class FeatureSpan:
    """The features of `count` positions of `slot`, from `start` on."""

    slot: int
    start: int
    count: int


class HandedOut(Protocol):
    """The features that a target's steps wrote, by slot and position."""

    def read(self, spans: Sequence[FeatureSpan]) -> list[NDArray[np.float32]]:
        """Copies each span's features [count, layers * hidden]; on the device thread."""


@runtime_checkable
class HandsOut(Protocol):
    """A target's runner whose steps can hand out hidden states (see tandem/runners/eagle/features.py)."""

    @property
    def layer_count(self) -> int:
        """Decoder layers of the target."""

    @property
    def hidden_size(self) -> int:
        """Units of a hidden state."""

    def hand_out(self, layers: Sequence[int]) -> HandedOut:
        """From now on every step writes the hidden states after so many `layers` to what is returned.

        The steps' results stay the same to the bit. Call it once, on the device thread. Raises ValueError, one line,
        if these steps cannot.
        """


@runtime_checkable
class TakesFeatures(Protocol):
    """A head's runner whose target is elsewhere."""

    @property
    def layers(self) -> tuple[int, ...]:
        """After how many of the target's layers it reads hidden states."""

    @property
    def target_hidden_size(self) -> int:
        """Units of a hidden state of its target."""

    @property
    def weights_revision_read(self) -> str:
        """The revision of the target's weights that its embedding is from; empty if it has its own."""

    def follow(self, slot: int, inbox: FeatureInbox) -> None:
        """From now on the slot's sequence has the features that come to `inbox`."""
