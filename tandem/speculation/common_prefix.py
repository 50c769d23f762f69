"""Compares token sequences, which differ near their ends if at all."""

from __future__ import annotations

from collections.abc import Sequence

_BLOCK = 512


def common(left: Sequence[int], right: Sequence[int], start: int = 0) -> int:
    """Returns the length of the common prefix. Positions below `start` are known to agree.

    Whole blocks are compared as slices: a loop over the tokens would take milliseconds of every round of a long text.
    """
    if type(left) is not type(right):  # slices of a list and a tuple are never equal
        left, right = list(left), list(right)
    end = min(len(left), len(right))
    for at in range(min(start, end), end, _BLOCK):
        until = min(at + _BLOCK, end)
        if left[at:until] != right[at:until]:
            return next(i for i in range(at, until) if left[i] != right[i])
    return end
