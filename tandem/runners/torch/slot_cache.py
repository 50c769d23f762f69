"""The slot KV cache: fixed memory, rows at different positions, free rollback.

Buffers are [kv_heads, (slots + 1) * length, head_dim]: one scatter_ reaches any slots, and neighboring slots are a
view. The extra slot takes padding rows. `length` is the sequence length plus the widest step. Eager steps read
neighboring slots as a view; graphs always gather. Each rank holds its share of the heads. On-demand memory (CPU, eager)
has `stride` positions per slot and head, which fill whole pages.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from tandem.runners.torch.platforms import Platform

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


@dataclass(slots=True)
class StepPlan:
    """Where a step's rows write and read, for every layer."""

    write: Tensor  # flat cache positions [1, rows * width, 1] int64
    slots: Tensor  # [rows] int64
    first: int | None  # first slot of neighbors, read as a view
    rows: int
    length: int  # positions that attention reads


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values of all slots."""

    is_compileable = True
    is_sliding = False

    def __init__(
        self,
        slots: int,
        kv_heads: int,
        length: int,
        head_dim: int,
        dtype: torch.dtype,
        platform: Platform,
        stride: int | None = None,
    ) -> None:
        """`stride`: positions from slot to slot in on-demand memory; None: `length`."""
        super().__init__()
        self.slots, self.length, self.stride = slots, length, stride or length
        # Moved as int16: scatter_ moves the same bits 20 times as fast on the CPU as 16-bit floats.
        self._as = torch.int16 if platform.packs and dtype.itemsize == 2 else dtype
        shape = (kv_heads, slots * self.stride, head_dim)
        self.memory = [OnDemandBuffer(shape, dtype) for _ in range(2)] if stride else []
        self.keys, self.values = (
            [each.tensor for each in self.memory]
            if stride
            else [torch.zeros(shape, dtype=dtype, device=platform.device) for _ in range(2)]
        )
        self.is_initialized = True
        self.plan: StepPlan | None = None

    def lazy_initialization(self, *args: object, **kwargs: object) -> None:
        """Memory is allocated from the start."""

    def update(self, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Writes [rows, kv_heads, width, head_dim]; returns the rows' caches [rows, kv_heads, length, d]."""
        assert self.plan is not None
        return self._write_read(self.keys, key), self._write_read(self.values, value)

    def _write_read(self, buffer: Tensor, new: Tensor) -> Tensor:
        plan, (rows, heads, width, dim) = self.plan, new.shape
        flat = new.transpose(0, 1).reshape(heads, rows * width, dim)
        where = plan.write.expand(heads, -1, dim)  # type: ignore[union-attr]
        buffer.view(self._as).scatter_(1, where, flat.view(self._as))
        return self._read(buffer, plan).transpose(0, 1)  # type: ignore[arg-type]

    def _read(self, buffer: Tensor, plan: StepPlan) -> Tensor:
        by_slot = buffer.view(buffer.shape[0], self.slots, self.stride, buffer.shape[2])[:, :, : plan.length]
        if plan.first is not None:
            return by_slot.narrow(1, plan.first, plan.rows)
        return by_slot.index_select(1, plan.slots)

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.length

    def get_max_cache_shape(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: object) -> tuple[int, int]:
        return self.length, 0


class Catching:
    """A cache that decoder layers leave hidden states in (tandem/runners/eagle/hidden_states.py)."""

    caught: dict[int, Tensor]

    def caught_after(self, layers: Sequence[int]) -> Tensor:
        """The run's hidden states after `layers`, [rows, width, layers * hidden]."""
        found = torch.cat([self.caught[layer] for layer in layers], dim=-1)
        self.caught.clear()
        return found


class LayeredSlots(Catching, Cache):
    def __init__(self, layers: list[SlotLayer]) -> None:
        super().__init__(layers=layers)
        self.caught = {}


class SlotCache:
    """All layers' slots as a transformers cache; with `ranks`, this process's heads."""

    def __init__(
        self,
        config: object,
        slots: int,
        max_length: int,
        widest: int,
        dtype: torch.dtype,
        platform: Platform,
        ranks: int = 1,
        on_demand: bool = False,
    ) -> None:
        heads = int(config.num_attention_heads)  # type: ignore[attr-defined]
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)  # type: ignore[attr-defined]
        self.length = max_length + widest
        self.spare = slots
        self._row_bytes = head_dim * dtype.itemsize
        self.stride = page_stride(self.length, self._row_bytes) if on_demand else self.length
        stride = self.stride if on_demand else None
        self.layers = [
            SlotLayer(slots + 1, kv_heads // ranks, self.length, head_dim, dtype, platform, stride)
            for _ in range(int(config.num_hidden_layers))  # type: ignore[attr-defined]
        ]
        self.cache = LayeredSlots(layers=self.layers)

    @property
    def buffers(self) -> list[Tensor]:
        """A graph's arguments: each layer's keys and values, [kv_heads, (slots + 1) * stride, head_dim]."""
        return [buffer for layer in self.layers for buffer in (layer.keys, layer.values)]

    @property
    def on_demand(self) -> bool:
        return bool(self.layers[0].memory)

    def taken(self, positions: int) -> int:
        """Bytes of pages for the first `positions` of a slot."""
        pages = whole_pages(min(positions, self.length) * self._row_bytes)
        return pages * len(self.buffers) * self.buffers[0].shape[0]

    def give_back(self, slot: int, positions: int = 0) -> None:
        """Frees a slot's memory beyond its first `positions`."""
        size, first = self.stride * self._row_bytes, whole_pages(min(positions, self.length) * self._row_bytes)
        for layer in self.layers:
            for memory in layer.memory:
                for head in range(layer.keys.shape[0]):
                    memory.give_back((head * (self.spare + 1) + slot) * size + first, size - first)

    def copy(self, source: int, target: int, length: int) -> None:
        read, write = source * self.stride, target * self.stride
        for layer in self.layers:
            for buffer in (layer.keys, layer.values):
                buffer[:, write : write + length] = buffer[:, read : read + length]

    def clear(self, slot: int) -> None:
        # masked values must be finite: 0 times NaN is NaN
        if self.on_demand:
            return self.give_back(slot)
        for buffer in self.buffers:
            buffer[:, slot * self.stride : (slot + 1) * self.stride] = 0

    def plan(self, slots: list[int], positions: Tensor, length: int) -> None:
        """Sets where the next step writes (positions [rows, width]) and reads (the first `length`)."""
        which = torch.tensor(slots, device=positions.device)
        plan = StepPlan(
            write=(which[:, None] * self.stride + positions).reshape(1, -1, 1),
            slots=which,
            first=slots[0] if slots == list(range(slots[0], slots[0] + len(slots))) else None,
            rows=len(slots),
            length=length,
        )
        for layer in self.layers:
            layer.plan = plan


class GatheredSlots(Catching):
    """The slots inside a graph: a transformers cache for one step.

    `buffers` are SlotCache's, of `length` positions a slot; slots [rows] and positions [rows, width] are int32.
    """

    def __init__(self, buffers: Sequence[Tensor], slots: Tensor, positions: Tensor, length: int) -> None:
        self._buffers, self._slots = buffers, slots
        self._write = (slots[:, None] * length + positions).reshape(-1).long()  # what index_copy_ takes
        self._length = length
        self.caught = {}

    def store(self, values: Tensor, layers: Sequence[int]) -> None:
        """Writes hidden states of `layers` to values [1, slots * slot_length, layers * hidden]."""
        found = self.caught_after(layers)
        values.index_copy_(1, self._write, found.reshape(1, -1, found.shape[-1]))

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Writes [rows, kv_heads, width, head_dim]; returns the rows' caches [rows, kv_heads, length, d]."""
        keys, values = self._buffers[2 * layer_idx], self._buffers[2 * layer_idx + 1]
        return self._write_read(keys, key), self._write_read(values, value)

    def _write_read(self, buffer: Tensor, new: Tensor) -> Tensor:
        rows, heads, width, dim = new.shape
        buffer.index_copy_(1, self._write, new.transpose(0, 1).reshape(heads, rows * width, dim))
        return buffer.view(heads, -1, self._length, dim).index_select(1, self._slots).transpose(0, 1)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0
