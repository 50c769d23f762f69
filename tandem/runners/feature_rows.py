"""How to read a target's features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tandem.speculation.features import FeatureSpec


@dataclass(frozen=True, slots=True)
class FeatureRow:
    """Reads the features of `count` positions of `slot` from `start` on, in the layers and format of `spec`."""

    slot: int
    start: int
    count: int
    spec: FeatureSpec


class HandedOut(Protocol):
    """Features by slot and position."""

    def read(self, rows: Sequence[FeatureRow]) -> list[NDArray[np.float32]]:
        """Copies each row's features of all layers [count, layers * hidden]; on the device thread."""
