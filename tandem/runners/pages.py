"""Defines how keys and values are copied out of slots and back, in pages of 16 positions.

Only runners whose keys and values have the same bits in whatever steps they were computed offer it, so that a copied
page is what processing its tokens again would give.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

PAGE = 16
"""Positions of a page. A native cache keeps the keys of 16 positions together, so a page is a few whole blocks."""


class PageStore(Protocol):
    """Memory for a fixed number of pages of one runner, used on its device thread alone.

    Page i of `pages` holds the positions of a slot from PAGE * (first + i) on.
    """

    def save(self, slot: int, first: int, pages: Sequence[int]) -> None:
        """Copies positions of `slot` to `pages`."""

    def load(self, slot: int, first: int, pages: Sequence[int]) -> None:
        """Copies `pages` to positions of `slot`."""

    def read(self, page: int) -> bytes:
        """Returns a page's bytes, in the order that `Pages.format` stands for."""

    def write(self, page: int, data: bytes) -> None:
        """Replaces a page by what `read` returned, here or in another process."""
