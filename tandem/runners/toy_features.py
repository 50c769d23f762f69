"""A toy target's features: its digests as numbers that every wire format keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem.runners.feature_rows import FeatureRow

LAYERS, HIDDEN = 3, 8


def toy_features(digests: NDArray[np.uint32], layers: Sequence[int]) -> NDArray[np.float32]:
    """Features [positions, layers * 8] of digests [positions]: half bytes from -8 to 7, ordered by layer."""
    shifts = np.arange(0, 4 * HIDDEN, 4, dtype=np.uint32)
    each = [(np.roll(shifts, layer)[None] + np.zeros((len(digests), 1), np.uint32)) for layer in layers]
    return ((digests[:, None] >> np.concatenate(each, axis=1)) & 15).astype(np.float32) - 8


def toy_digests(features: NDArray[np.float32], layers: Sequence[int]) -> NDArray[np.uint32]:
    """Digests [positions] of features; 0 where layers contradict each other."""
    halves = (np.rint(features) + 8).astype(np.uint32).reshape(len(features), len(layers), HIDDEN)
    shifts = np.arange(0, 4 * HIDDEN, 4, dtype=np.uint32)
    each = np.stack([(halves[:, i] << np.roll(shifts, n)).sum(axis=-1) for i, n in enumerate(layers)]).astype(np.uint32)
    return np.where((each == each[0]).all(axis=0), each[0], np.uint32(0))


@dataclass(frozen=True, slots=True)
class ToyFeatures:
    """Implements HandedOut with the digests [slots, length] of a toy."""

    digests: NDArray[np.uint32]
    layers: tuple[int, ...]

    def read(self, rows: Sequence[FeatureRow]) -> list[NDArray[np.float32]]:
        return [toy_features(self.digests[r.slot, r.start : r.start + r.count], self.layers) for r in rows]
