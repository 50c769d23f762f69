"""Copies whole pages between slots and bytes from or for other processes, as steps between those of other rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from tandem.engine.compatibility import able, refusal
from tandem.runners.capabilities import No
from tandem.runners.pages import PAGE, PageStore
from tandem.runners.protocol import PrefillRow, Runner

if TYPE_CHECKING:
    from tandem.engine.batcher import Batcher

RUN_BYTES = 2**20  # of pages sent together, unless one alone has more
MOST_PAGES = 64


@dataclass(frozen=True, slots=True)
class PageLayout:
    """What must be equal in two processes for their pages to be bit-identical."""

    weights_revision: str
    dtype: str
    backend: str
    format: str
    page_tokens: int
    page_bytes: int

    def difference(self, other: PageLayout) -> str | None:
        """Why pages of `other` are useless here, or None."""
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            if ours != theirs:
                return f"{field.name}: {theirs!r} there, {ours!r} here"
        return None


@dataclass(frozen=True, slots=True)
class PageRun:
    """Neighbouring pages from number `first` on."""

    first: int
    pages: tuple[bytes, ...]

    @property
    def end(self) -> int:
        return self.first + len(self.pages)


@dataclass(frozen=True, slots=True)
class PageRow:
    """Copies `count` pages of `slot` out, from page `first` on, or `run` into it."""

    slot: int
    first: int = 0
    count: int = 0
    run: PageRun | None = None


class PageCopies:
    """Copies pages of one runner's slots, `together` at once."""

    def __init__(self, layout: PageLayout, runner: Runner, store: PageStore, together: int) -> None:
        self.layout, self.together, self._runner, self._store = layout, together, runner, store

    @classmethod
    async def of(cls, runner: Runner, batcher: Batcher) -> PageCopies:
        """Allocates memory, on the device thread. Raises ValueError, one line, if the runner has no pages."""
        return await batcher.on_device(cls._made, runner)

    @classmethod
    def _made(cls, runner: Runner) -> PageCopies:
        pages, of = able(runner).pages, runner.identity
        if isinstance(pages, No):
            raise refusal("prefill", of.model_name, "pages", pages)
        layout = PageLayout(of.weights_revision, of.dtype, of.backend, pages.format, PAGE, pages.bytes)
        together = min(MOST_PAGES, max(1, RUN_BYTES // pages.bytes))
        return cls(layout, runner, pages.store(together), together)

    def out(self, rows: Sequence[PageRow]) -> list[PageRun]:
        """A batcher step: reads pages, at most `together` per row."""
        return [PageRun(row.first, self._read(row)) for row in rows]

    def into(self, rows: Sequence[PageRow]) -> list[None]:
        """A batcher step of one row: writes its run, of any length."""
        (row,) = rows
        assert row.run is not None
        for at in range(0, len(row.run.pages), self.together):
            part = row.run.pages[at : at + self.together]
            for place, data in enumerate(part):
                self._store.write(place, data)
            self._store.load(row.slot, row.run.first + at, range(len(part)))
        return [None]

    def agree(self, tokens: Sequence[int], adapter: int, rows: Sequence[PageRow]) -> list[bool]:
        """A batcher step of one row: computes its run's one page from the slot's `tokens` and compares bytes."""
        (row,) = rows
        assert row.run is not None
        start, chunk = row.run.first * PAGE, min(PAGE, self._runner.limits.chunk)
        for at in range(start, start + PAGE, chunk):
            fed = tuple(tokens[at : min(at + chunk, start + PAGE)])
            if any(self._runner.prefill([PrefillRow(row.slot, at, fed, adapter)])):
                return [False]
        return [self._read(PageRow(row.slot, row.run.first, 1)) == row.run.pages]

    def _read(self, row: PageRow) -> tuple[bytes, ...]:
        places = range(row.count)
        self._store.save(row.slot, row.first, places)
        return tuple(map(self._store.read, places))
