"""Defines how keys and values are copied out of slots and back, in pages of 16 positions.

Only runners whose keys and values have the same bits in whatever steps they were computed offer it, so that a copied
page is what processing its tokens again would give.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

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
        """Returns a page's bytes: `page_bytes` of them, in the order that `page_format` stands for."""

    def write(self, page: int, data: bytes) -> None:
        """Replaces a page by what `read` returned, here or in another process."""


@runtime_checkable
class CopiesPages(Protocol):
    """A runner that may be able to copy pages; final once `warm_up` has returned."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, the features that a head reads included; 0 if this runner cannot copy pages, or not with
        the same bits.

        It is 0 for a head, which makes its keys again from its target's features.
        """

    @property
    def page_format(self) -> str:
        """What the bits of a page depend on, besides the weights and the number format; another process has the same
        pages if it says the same."""

    def page_store(self, pages: int) -> PageStore:
        """Allocates memory for so many pages."""
