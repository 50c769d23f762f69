"""Defines how the features are read that a target's steps hand out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


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
