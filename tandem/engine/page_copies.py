"""Copies whole pages of keys and values out of slots as bytes, and bytes of another process into slots.

Both are steps for the batcher, so that they run between the steps of other rows: a page is copied out once all of it is
processed, and no page arrives while a step runs. Bytes pass through a few pages of memory of their own.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from tandem.engine.prefix_cache import Filled
from tandem.runners.pages import PAGE, CopiesPages, PageStore
from tandem.runners.protocol import Runner

if TYPE_CHECKING:
    from tandem.engine.batcher import Batcher
    from tandem.engine.prefix_cache import PrefixCache

RUN_BYTES = 2**20
"""Pages that travel together have at most this many bytes, unless one alone has more."""
MOST_PAGES = 64


@dataclass(frozen=True, slots=True)
class PageLayout:
    """What two processes must have in common for pages of one to be, bit for bit, what the other would compute."""

    weights_revision: str
    dtype: str
    backend: str
    format: str
    page_tokens: int
    page_bytes: int

    def difference(self, other: PageLayout) -> str | None:
        """Returns why pages of `other` are of no use here; None if they are the same."""
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            if ours != theirs:
                return f"{field.name}: {theirs!r} there, {ours!r} here"
        return None


@dataclass(frozen=True, slots=True)
class PageRun:
    """Neighbouring pages: number `first` and those after it."""

    first: int
    pages: tuple[bytes, ...]

    @property
    def end(self) -> int:
        """The number of the page after the last one."""
        return self.first + len(self.pages)


@dataclass(frozen=True, slots=True)
class PageRow:
    """A row of a step that copies pages of `slot`: out of it, `count` from page `first` on, or `run` into it."""

    slot: int
    first: int = 0
    count: int = 0
    run: PageRun | None = None


class PageCopies:
    """Copies pages of one runner's slots. `layout` is what they look like; `together`: pages of one run at most."""

    def __init__(self, layout: PageLayout, store: PageStore, together: int) -> None:
        self.layout, self.together, self._store = layout, together, store

    @classmethod
    async def of(cls, runner: Runner, batcher: Batcher) -> PageCopies:
        """Allocates the memory, on the device thread. Raises ValueError with one line if pages cannot be copied."""
        return await batcher.on_device(cls._made, runner)

    @classmethod
    def _made(cls, runner: Runner) -> PageCopies:
        identity = runner.identity
        if not isinstance(runner, CopiesPages) or not runner.page_bytes:
            raise ValueError(
                f"prefill: the steps of this {identity.backend} model cannot copy keys and values out of slots, or not "
                "with the same bits"
            )
        layout = PageLayout(
            identity.weights_revision, identity.dtype, identity.backend, runner.page_format, PAGE, runner.page_bytes
        )
        together = min(MOST_PAGES, max(1, RUN_BYTES // runner.page_bytes))
        return cls(layout, runner.page_store(together), together)

    def out(self, rows: Sequence[PageRow]) -> list[PageRun]:
        """Reads pages of slots; a row has at most `together` of them. A step for the batcher."""
        return [PageRun(row.first, self._read(row)) for row in rows]

    def into(
        self, prefixes: PrefixCache | None, scope: Hashable, tokens: Sequence[int], rows: Sequence[PageRow]
    ) -> list[Filled]:
        """Writes the row's run to its slot, and keeps it among the known prefixes. A step for the batcher, of one row.

        `tokens`: those that the slot then holds, from position 0 on.
        """
        (row,) = rows
        assert row.run is not None
        places = range(len(row.run.pages))
        for place, data in zip(places, row.run.pages, strict=True):
            self._store.write(place, data)
        self._store.load(row.slot, row.run.first, places)
        if prefixes is not None:
            prefixes.keep(scope, tokens, row.slot)
        return [Filled(len(tokens), 0)]

    def _read(self, row: PageRow) -> tuple[bytes, ...]:
        places = range(row.count)
        self._store.save(row.slot, row.first, places)
        return tuple(map(self._store.read, places))
