"""Prompt lookup by scanning (16 us); NgramDrafter's index of 4,096 tokens takes 67 ms, too long for a step."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

LONGEST = 5  # longer repetitions are not preferred to later ones


def copied(ids: NDArray[Any], shortest: int, k: int) -> tuple[int, ...]:
    """Returns the `k` tokens after the latest earlier occurrence of the longest suffix; a copy may continue itself."""
    length = len(ids)
    if k < 1 or length <= shortest:
        return ()
    ends = np.flatnonzero(ids[:-1] == ids[-1])  # where the last token stood before
    best = -1
    for back in range(1, max(shortest, LONGEST)):
        if back >= shortest:
            best = int(ends[-1]) if len(ends) else best
        ends = ends[ends >= back]
        ends = ends[ids[ends - back] == ids[length - 1 - back]] if back < length else ends[:0]
        if not len(ends):
            break
    else:
        best = int(ends[-1])
    if best < 0:
        return ()
    period = length - 1 - best
    return tuple(int(ids[best + 1 + i % period]) for i in range(k))
