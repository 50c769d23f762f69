"""Common prefixes of token sequences."""

from __future__ import annotations

from collections.abc import Sequence

_BLOCK = 512  # slices of this size are compared: a loop over tokens takes milliseconds of long texts


def common(left: Sequence[int], right: Sequence[int], start: int = 0) -> int:
    """Returns the length of the common prefix; positions below `start` agree."""
    if type(left) is not type(right):  # slices of a list and a tuple are never equal
        left, right = list(left), list(right)
    end = min(len(left), len(right))
    for at in range(min(start, end), end, _BLOCK):
        until = min(at + _BLOCK, end)
        if left[at:until] != right[at:until]:
            return next(i for i in range(at, until) if left[i] != right[i])
    return end
