"""Copies pages between a SlotCache and page memory on the same device."""

from __future__ import annotations

import platform
import zlib
from collections.abc import Sequence
from importlib.metadata import version

import torch

from tandem.host.host import first_processor
from tandem.runners.capabilities import PAGE
from tandem.runners.protocol import Limits
from tandem.runners.torch.slot_cache import SlotCache


class TorchPages:
    """Implements PageStore, with `features` [slots, length, width] in the pages if handed out."""

    def __init__(self, slots: SlotCache, pages: int, features: torch.Tensor | None = None) -> None:
        self._slots, self._features = slots, features
        heads, _, dim = slots.buffers[0].shape
        shape = (len(slots.buffers), pages, heads, PAGE, dim)
        self._memory = torch.zeros(shape, dtype=slots.buffers[0].dtype, device=slots.buffers[0].device)
        self._handed_out = None if features is None else features.new_zeros(pages, PAGE, features.shape[2])

    def save(self, slot: int, first: int, pages: Sequence[int]) -> None:
        which = torch.tensor(pages, device=self._memory.device)
        for buffer, stored in zip(self._slots.buffers, self._memory, strict=True):
            stored[which] = self._positions(buffer, slot, first, len(pages)).transpose(0, 1)
        if self._features is not None and self._handed_out is not None:
            self._handed_out[which] = _features_at(self._features, slot, first, len(pages))

    def load(self, slot: int, first: int, pages: Sequence[int]) -> None:
        which = torch.tensor(pages, device=self._memory.device)
        for buffer, stored in zip(self._slots.buffers, self._memory, strict=True):
            self._positions(buffer, slot, first, len(pages)).copy_(stored[which].transpose(0, 1))
        if self._features is not None and self._handed_out is not None:
            _features_at(self._features, slot, first, len(pages)).copy_(self._handed_out[which])

    def read(self, page: int) -> bytes:
        held = [self._memory[:, page]] + ([] if self._handed_out is None else [self._handed_out[page]])
        return b"".join(_bytes(part) for part in held)

    def write(self, page: int, data: bytes) -> None:
        own = self._memory[:, page]
        kept = own.numel() * own.element_size()
        _put(own, data[:kept])
        if self._handed_out is not None:
            _put(self._handed_out[page], data[kept:])

    def _positions(self, buffer: torch.Tensor, slot: int, first: int, count: int) -> torch.Tensor:
        """A view [kv_heads, count, PAGE, head_dim] from page `first` on."""
        start = slot * self._slots.stride + first * PAGE
        heads, _, dim = buffer.shape
        return buffer[:, start : start + count * PAGE].view(heads, count, PAGE, dim)


def _bytes(values: torch.Tensor) -> bytes:
    return bytes(values.contiguous().cpu().view(torch.uint8).numpy().tobytes())


def _put(values: torch.Tensor, data: bytes) -> None:
    values.copy_(torch.frombuffer(bytearray(data), dtype=values.dtype).view(values.shape))


def _features_at(features: torch.Tensor, slot: int, first: int, count: int) -> torch.Tensor:
    """A view [count, PAGE, width] from page `first` on."""
    return features[slot, first * PAGE : (first + count) * PAGE].view(count, PAGE, -1)


def page_bytes(slots: SlotCache, features: torch.Tensor | None = None) -> int:
    heads, _, dim = slots.buffers[0].shape
    held = len(slots.buffers) * heads * PAGE * dim * slots.buffers[0].element_size()
    return held + (0 if features is None else PAGE * features.shape[2] * features.element_size())


def page_format(slots: SlotCache, ranks: int, limits: Limits, threads: int) -> str:
    """Names everything that may choose a kernel: libraries, device, threads, step shapes."""
    heads, _, dim = slots.buffers[0].shape
    device = slots.buffers[0].device
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} {_cpu()}"
    said = f"module code, torch {torch.__version__}, transformers {version('transformers')}, {kind}, {threads} threads"
    shape = f"{len(slots.buffers)} buffers of {heads} heads of {dim}, {ranks} ranks"
    return f"{said}, {shape}, {limits.slots} slots of {slots.length}, chunk {limits.chunk}, draft {limits.max_draft}"


def _cpu() -> str:
    processor = first_processor()
    flags = processor.get("flags") or processor.get("features") or platform.processor()
    return f"{torch.backends.cpu.get_cpu_capability()} {zlib.crc32(flags.encode()):08x}"
