"""Defines how to read the features that a target's steps hand out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tandem.speculation.features import FeatureSpec


@dataclass(frozen=True, slots=True)
class FeatureRow:
    """Asks for the features of `count` positions of `slot`, from `start` on. `spec`: which, and in which format."""

    slot: int
    start: int
    count: int
    spec: FeatureSpec


class HandedOut(Protocol):
    """The features that a target's steps wrote, by slot and position."""

    def read(self, rows: Sequence[FeatureRow]) -> list[NDArray[np.float32]]:
        """Copies each row's features of all layers [count, layers * hidden]; on the device thread."""
