"""Copies pages between the slots of a NativeSteps and page memory."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from tandem.runners.native.build import sources_hash
from tandem.runners.native.library import ints
from tandem.runners.native.steps import NativeSteps

_UNFUSED = "two roundings"
_COMPARED = 64  # positions whose rotary embedding is compared; the number of positions may differ


class NativePages:
    """Implements PageStore."""

    def __init__(self, model: NativeSteps, pages: int) -> None:
        self._model, self._memory = model, np.empty((pages, page_bytes(model)), dtype=np.uint8)
        self._memory.fill(0)  # memory is mapped when first written, and that would slow down a prompt
        self._address = self._memory.ctypes.data

    def save(self, slot: int, first: int, pages: Sequence[int]) -> None:
        self._copy(self._model.library.tandem_save_pages, slot, first, pages)

    def load(self, slot: int, first: int, pages: Sequence[int]) -> None:
        self._copy(self._model.library.tandem_load_pages, slot, first, pages)

    def _copy(self, call: Any, slot: int, first: int, pages: Sequence[int]) -> None:
        call(self._model.handle, slot, first, len(pages), ints(pages), self._address, len(self._memory))

    def read(self, page: int) -> bytes:
        return self._memory[page].tobytes()

    def write(self, page: int, data: bytes) -> None:
        self._memory[page] = np.frombuffer(data, dtype=np.uint8)


def page_bytes(model: NativeSteps) -> int:
    return int(model.library.tandem_page_bytes(model.handle))


def page_format(model: NativeSteps) -> str:
    """Names sources, shape, rotary tables, and instructions unless in float32, which all fusing CPUs compute alike."""
    sizes, rotary = model.sizes, b"".join(table[:_COMPARED].tobytes() for table in model.rotary)
    said = f"native {sources_hash()[:16]}, {sizes.layers} layers of {sizes.kv_heads} heads of {sizes.head_dim}"
    said += f", rotary embedding {zlib.crc32(rotary):08x}"
    instructions = model.library.tandem_instructions().decode()
    return said if model.dtype == "float32" and instructions != _UNFUSED else f"{said}, {instructions}"
