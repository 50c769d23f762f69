"""Keeps the hidden states that native steps hand out, by slot and position, in memory that the library writes to.

They are a cache like the keys and values. tandem/runners/eagle/hidden_states.py does the same for torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.checkpoints.numbers import STORAGE, Floats, Stored
from tandem.runners.feature_rows import FeatureRow


@dataclass(frozen=True, slots=True, eq=False)
class NativeFeatures:
    """stored: [slots, length, 3 * hidden] in float32 or bfloat16. embedding: the target's own, [vocabulary, hidden]."""

    stored: Stored
    embedding: Stored

    @property
    def values(self) -> NDArray[Any]:
        """The numbers of `stored`; of bfloat16, their bits."""
        return self.stored.values

    def read(self, rows: Sequence[FeatureRow]) -> list[Floats]:
        """Copies each row's features [count, 3 * hidden]."""
        return [
            Stored(self.stored.dtype, self.values[row.slot, row.start : row.start + row.count].copy()).floats()
            for row in rows
        ]


def room_for_features(shape: tuple[int, int, int], dtype: str) -> Stored:
    """Zeros [slots, length, numbers] in "F32" or "BF16"."""
    return Stored(dtype, np.zeros(shape, dtype=STORAGE[dtype]))
