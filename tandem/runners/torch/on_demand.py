"""Tensors whose memory the system allocates page by page, on first write."""

from __future__ import annotations

import math
import mmap

import torch

MAPPED_PAGE = mmap.PAGESIZE


def page_stride(positions: int, row_bytes: int) -> int:
    """The least number of positions, at least `positions`, whose rows of `row_bytes` fill whole pages."""
    step = MAPPED_PAGE // math.gcd(MAPPED_PAGE, row_bytes)
    return -(-positions // step) * step


def whole_pages(count: int) -> int:
    """Bytes of the pages that `count` bytes cover."""
    return -(-count // MAPPED_PAGE) * MAPPED_PAGE


class OnDemandBuffer:
    """A tensor of zeros that takes memory as it is written, in small pages: large ones hold several positions."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        size = math.prod(shape) * dtype.itemsize
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._memory = mmap.mmap(-1, size, flags=flags)
        self._memory.madvise(mmap.MADV_NOHUGEPAGE)
        self.tensor = torch.frombuffer(self._memory, dtype=dtype).view(shape)

    def give_back(self, start: int, size: int) -> None:
        """Frees whole pages from byte `start` on; they then read as zeros."""
        if size:
            self._memory.madvise(mmap.MADV_DONTNEED, start, size)
