"""Tensors in memory that the system gives page by page, as it is first written."""

from __future__ import annotations

import math
import mmap

import torch

MAPPED_PAGE = mmap.PAGESIZE


def page_stride(positions: int, row_bytes: int) -> int:
    """Returns the least number of positions from `positions` on that fills whole pages with rows of `row_bytes`."""
    step = MAPPED_PAGE // math.gcd(MAPPED_PAGE, row_bytes)
    return -(-positions // step) * step


def whole_pages(count: int) -> int:
    """Returns the bytes of the pages that `count` bytes lie on, from the start of a page."""
    return -(-count // MAPPED_PAGE) * MAPPED_PAGE


class OnDemandBuffer:
    """A tensor of zeros that takes memory as it is written, by the page of the system.

    Large pages (2 MiB) would be given whole for a single position of a head.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        size = math.prod(shape) * dtype.itemsize
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._memory = mmap.mmap(-1, size, flags=flags)
        self._memory.madvise(mmap.MADV_NOHUGEPAGE)
        self.tensor = torch.frombuffer(self._memory, dtype=dtype).view(shape)

    def give_back(self, start: int, size: int) -> None:
        """Gives back whole pages from byte `start` on; they read as zeros then."""
        if size:
            self._memory.madvise(mmap.MADV_DONTNEED, start, size)
