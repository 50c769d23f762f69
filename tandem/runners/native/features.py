"""Keeps the hidden states that native steps hand out, by slot and position, in memory that the library writes to.

They are a cache like the keys and values. tandem/runners/eagle/hidden_states.py does the same for torch.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.checkpoints.numbers import STORAGE, Floats, Stored
from tandem.runners.feature_rows import FeatureRow


@dataclass(frozen=True, slots=True, eq=False)
class NativeFeatures:
    """stored: [slots, length, 3 * hidden] in float32 or bfloat16. embedding: the target's own, [vocabulary, hidden].

    The system gives the `memory` of `stored` page by page, as it is first written. Pages at the ends of slots belong to
    two of them, and are never given back: those are the `spare_bytes`.
    """

    stored: Stored
    memory: mmap.mmap
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

    @property
    def spare_bytes(self) -> int:
        return (len(self.values) + 1) * mmap.PAGESIZE

    def slot_bytes(self, positions: int) -> int:
        """Most bytes of the pages inside a slot that its first `positions` take."""
        return min(positions, self.values.shape[1]) * self.values[0, 0].nbytes + mmap.PAGESIZE

    def give_back(self, slot: int, positions: int = 0) -> None:
        """Gives back the memory of a slot behind the pages of its first `positions`."""
        start = (slot * self.values.shape[1] + positions) * self.values[0, 0].nbytes
        start, end = -(-start // mmap.PAGESIZE), (slot + 1) * self.values[0].nbytes // mmap.PAGESIZE
        if start < end:
            self.memory.madvise(mmap.MADV_DONTNEED, start * mmap.PAGESIZE, (end - start) * mmap.PAGESIZE)


def features_of(shape: tuple[int, int, int], dtype: str, embedding: Stored) -> NativeFeatures:
    """Room for features [slots, length, numbers] in "F32" or "BF16", all zeros."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = mmap.mmap(-1, math.prod(shape) * np.dtype(STORAGE[dtype]).itemsize, flags=flags)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return NativeFeatures(Stored(dtype, np.frombuffer(memory, STORAGE[dtype]).reshape(shape)), memory, embedding)
