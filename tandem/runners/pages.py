"""Copies keys and values between slots and pages of 16 positions, for runners whose bits do not depend on the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

PAGE = 16  # positions; a native cache keeps the keys of 16 positions together


class PageStore(Protocol):
    """A fixed number of pages, used on the device thread. Page i holds positions PAGE * (first + i) and on."""

    def save(self, slot: int, first: int, pages: Sequence[int]) -> None:
        """Copies positions of `slot` to `pages`."""

    def load(self, slot: int, first: int, pages: Sequence[int]) -> None:
        """Copies `pages` to positions of `slot`."""

    def read(self, page: int) -> bytes:
        """A page's bytes, as in `Pages.format`."""

    def write(self, page: int, data: bytes) -> None:
        """Replaces a page by bytes that `read` returned, in any process."""
