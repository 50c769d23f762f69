"""Copies pages of keys and values between the slots of a NativeSteps and memory of their own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tandem.runners.native.library import ints
from tandem.runners.native.steps import NativeSteps


class NativePages:
    """Implements PageStore."""

    def __init__(self, model: NativeSteps, pages: int) -> None:
        self._model, self._memory = model, np.empty((pages, page_bytes(model)), dtype=np.uint8)
        self._memory.fill(0)  # memory is mapped when first written, and that would slow down a prompt
        self._address = self._memory.ctypes.data

    def save(self, slot: int, first: int, pages: Sequence[int]) -> None:
        self._model.library.tandem_save_pages(self._model.handle, slot, first, len(pages), ints(pages), self._address)

    def load(self, slot: int, first: int, pages: Sequence[int]) -> None:
        self._model.library.tandem_load_pages(self._model.handle, slot, first, len(pages), ints(pages), self._address)


def page_bytes(model: NativeSteps) -> int:
    return int(model.library.tandem_page_bytes(model.handle))
