"""Hidden states of native steps by slot and position, in memory that the library writes."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.checkpoints.numbers import STORAGE, Floats, Stored
from tandem.runners.capabilities import FeatureRow


@dataclass(frozen=True, slots=True, eq=False)
class NativeFeatures:
    """Features in `memory` taken as it is written; pages shared by two slots are never freed."""

    stored: Stored  # [slots, length, 3 * hidden], float32 or bfloat16
    memory: mmap.mmap
    embedding: Stored  # the target's, [vocabulary, hidden]

    @property
    def values(self) -> NDArray[Any]:
        """The numbers of `stored`, bfloat16 as bits."""
        return self.stored.values

    def read(self, rows: Sequence[FeatureRow]) -> list[Floats]:
        return [
            Stored(self.stored.dtype, self.values[row.slot, row.start : row.start + row.count].copy()).floats()
            for row in rows
        ]

    @property
    def spare_bytes(self) -> int:
        return (len(self.values) + 1) * mmap.PAGESIZE

    def slot_bytes(self, positions: int) -> int:
        """Maximum bytes of a slot's own pages for its first `positions`."""
        return min(positions, self.values.shape[1]) * self.values[0, 0].nbytes + mmap.PAGESIZE

    def give_back(self, slot: int, positions: int = 0) -> None:
        """Frees a slot's memory beyond its first `positions`."""
        start = (slot * self.values.shape[1] + positions) * self.values[0, 0].nbytes
        start, end = -(-start // mmap.PAGESIZE), (slot + 1) * self.values[0].nbytes // mmap.PAGESIZE
        if start < end:
            self.memory.madvise(mmap.MADV_DONTNEED, start * mmap.PAGESIZE, (end - start) * mmap.PAGESIZE)


def features_of(shape: tuple[int, int, int], dtype: str, embedding: Stored) -> NativeFeatures:
    """Zeroed features [slots, length, numbers] in "F32" or "BF16"."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = mmap.mmap(-1, math.prod(shape) * np.dtype(STORAGE[dtype]).itemsize, flags=flags)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return NativeFeatures(Stored(dtype, np.frombuffer(memory, STORAGE[dtype]).reshape(shape)), memory, embedding)
