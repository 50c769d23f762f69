"""Prompts that another process computes: its pages fill slots here, and what does not arrive is processed here."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from tandem.engine.compatibility import able, refusal
from tandem.engine.sequences import KVSequence
from tandem.runners.capabilities import PAGE, No, PageStore
from tandem.runners.protocol import PrefillRow, Runner
from tandem.speculation.types import Request

if TYPE_CHECKING:
    from tandem.engine.batcher import Batcher
    from tandem.engine.engine import Engine

MIN_TOKENS = 256
REASONS = ("busy", "corrupt", "cut", "failed", "late", "mismatch", "refused", "unavailable", "wrong")
RUN_BYTES = 2**20  # of pages sent together, unless one alone has more
MOST_PAGES = 64


class PrefillFailed(Exception):
    """No pages, or no more, will come. `reason`: one of REASONS."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


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
    """Neighbouring pages from number `first` on. As a row: `pages` are copied into `slot`, or `count` out of it."""

    first: int
    pages: tuple[bytes, ...] = ()
    slot: int = 0
    count: int = 0

    @property
    def end(self) -> int:
        return self.first + len(self.pages)


class PageCopies:
    """Copies pages of one runner's slots, `together` at once, as steps between those of other rows."""

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

    def out(self, rows: Sequence[PageRun]) -> list[PageRun]:
        """A batcher step: reads pages, at most `together` per row."""
        return [PageRun(row.first, self._read(row)) for row in rows]

    def into(self, rows: Sequence[PageRun]) -> list[None]:
        """A batcher step of one row: writes its run, of any length."""
        (row,) = rows
        for at in range(0, len(row.pages), self.together):
            part = row.pages[at : at + self.together]
            for place, data in enumerate(part):
                self._store.write(place, data)
            self._store.load(row.slot, row.first + at, range(len(part)))
        return [None]

    def agree(self, tokens: Sequence[int], adapter: int, rows: Sequence[PageRun]) -> list[bool]:
        """A batcher step of one row: computes its run's one page from the slot's `tokens` and compares bytes."""
        (row,) = rows
        start, chunk = row.first * PAGE, min(PAGE, self._runner.limits.chunk)
        for at in range(start, start + PAGE, chunk):
            fed = tuple(tokens[at : min(at + chunk, start + PAGE)])
            if any(self._runner.prefill([PrefillRow(row.slot, at, fed, adapter)])):
                return [False]
        return [self._read(replace(row, count=1)) == row.pages]

    def _read(self, row: PageRun) -> tuple[bytes, ...]:
        places = range(row.count)
        self._store.save(row.slot, row.first, places)
        return tuple(map(self._store.read, places))


class PrefillPages:
    """Pages of prompts, for other processes. `asked`, `pages`: totals."""

    def __init__(self, engine: Engine, copies: PageCopies) -> None:
        self._engine, self._copies, self.layout = engine, copies, copies.layout
        self.asked = self.pages = 0

    async def of(self, tokens: Sequence[int], first: int, request: Request) -> AsyncGenerator[PageRun, None]:
        """Yields whole pages of `tokens` from number `first` on. Raises NoFreeSlot, InvalidField."""
        self.asked += 1
        sequence = await KVSequence.admitted(self._engine, request, len(tokens))
        chunk = self._engine.runner.limits.chunk
        try:
            while len(sequence.held) < len(tokens):
                await sequence.fill(tokens[: len(sequence.held) + chunk])
                whole = len(sequence.held) // PAGE
                while first < whole:
                    row = PageRun(first, (), sequence.slot, min(self._copies.together, whole - first))
                    run = (await sequence.step(self._copies.out, row, prefill=True)).value
                    first = run.end
                    self.pages += row.count
                    yield run
        finally:
            sequence.close()


# Fetches pages of an adapter's (name, revision) whole-page tokens from a page on, and passes them on in order, checked.
# Raises PrefillFailed if one is missing.
Fetch = Callable[[tuple[int, ...], int, tuple[str, str], Callable[[PageRun], Awaitable[None]]], Awaitable[None]]


class RemotePrefill:
    """Computes prompts elsewhere if at least `least` of their tokens are not cached; counts totals."""

    def __init__(self, engine: Engine, fetch: Fetch, copies: PageCopies, least: int = MIN_TOKENS) -> None:
        self._engine, self.fetch, self._copies, self._least = engine, fetch, copies, least
        self.requests = self.pages = self.bytes = 0
        self.seconds, self.fallbacks = 0.0, Counter[str](dict.fromkeys(REASONS, 0))

    async def fill(self, sequence: KVSequence, tokens: Sequence[int]) -> int | None:
        """Fills the slot with pages that come; returns the number of tokens from caches, None without a lookup."""
        if len(tokens) - len(sequence.held) < self._least:
            return None
        copied = await self._copy_cached(sequence, tokens)
        if len(tokens) - len(sequence.held) < self._least:
            return copied
        adapter = self._engine.adapters.named(sequence.adapter)
        whole, known = len(tokens) // PAGE * PAGE, len(sequence.held) // PAGE
        began = time.perf_counter()
        self.requests += 1
        self._engine.batcher.away += 1
        try:
            put = functools.partial(self._put, sequence, tokens, known)
            await self.fetch(tuple(tokens[:whole]), known, adapter, put)
        except PrefillFailed as error:
            self.fallbacks[error.reason] += 1
        finally:
            self._engine.batcher.away -= 1
        self.seconds += time.perf_counter() - began
        return copied

    async def _copy_cached(self, sequence: KVSequence, tokens: Sequence[int]) -> int | None:
        prefixes, start = self._engine.prefixes, len(sequence.held)
        if prefixes is None:
            return None
        row = PrefillRow(sequence.slot, start, tuple(tokens[start : start + 1]), sequence.adapter)
        step = functools.partial(prefixes.copied, sequence.scope, tuple(tokens), row, True)
        copied: int = (await sequence.step(lambda rows: [step()], row, prefill=True)).value
        sequence.held += tokens[start : start + copied]
        return copied

    async def _put(self, sequence: KVSequence, tokens: Sequence[int], first: int, run: PageRun) -> None:
        """Writes a run; computes one page of the first run here too, and raises PrefillFailed if it differs."""
        done = await sequence.step(self._copies.into, replace(run, slot=sequence.slot), prefill=True)
        sequence.queue_seconds += done.queue_seconds
        sequence.compute_seconds += done.compute_seconds
        sequence.held[run.first * PAGE :] = tokens[run.first * PAGE : run.end * PAGE]
        self.pages += len(run.pages)
        self.bytes += sum(map(len, run.pages))
        if run.first == first:
            last = PageRun(run.end - 1, run.pages[-1:], sequence.slot)
            step = functools.partial(self._copies.agree, tokens, sequence.adapter)
            if not (await sequence.step(step, last, prefill=True)).value:
                sequence.invalidate()
                raise PrefillFailed("wrong", f"page {run.end - 1} of a prompt is not what this target computes")
