"""Copies pages of keys and values between the slots of a SlotCache and memory of their own, on the same device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.runners.pages import PAGE
from tandem.runners.torch.slot_cache import SlotCache


class TorchPages:
    """Implements PageStore."""

    def __init__(self, slots: SlotCache, pages: int) -> None:
        self._slots = slots
        heads, _, dim = slots.buffers[0].shape
        shape = (len(slots.buffers), pages, heads, PAGE, dim)
        self._memory = torch.zeros(shape, dtype=slots.buffers[0].dtype, device=slots.buffers[0].device)

    def save(self, slot: int, first: int, pages: Sequence[int]) -> None:
        which = torch.tensor(pages, device=self._memory.device)
        for buffer, stored in zip(self._slots.buffers, self._memory, strict=True):
            stored[which] = self._positions(buffer, slot, first, len(pages)).transpose(0, 1)

    def load(self, slot: int, first: int, pages: Sequence[int]) -> None:
        which = torch.tensor(pages, device=self._memory.device)
        for buffer, stored in zip(self._slots.buffers, self._memory, strict=True):
            self._positions(buffer, slot, first, len(pages)).copy_(stored[which].transpose(0, 1))

    def _positions(self, buffer: torch.Tensor, slot: int, first: int, count: int) -> torch.Tensor:
        """A view [kv_heads, count, PAGE, head_dim] of `count` pages of a slot from page `first` on."""
        start = slot * self._slots.stride + first * PAGE
        heads, _, dim = buffer.shape
        return buffer[:, start : start + count * PAGE].view(heads, count, PAGE, dim)


def page_bytes(slots: SlotCache) -> int:
    heads, _, dim = slots.buffers[0].shape
    return len(slots.buffers) * heads * PAGE * dim * slots.buffers[0].element_size()
