"""Fills slots with pages that another process computes, while the steps of other rows go on here.

The last tokens of a prompt are always processed here, and so is whatever does not arrive: a request never fails because
of the other process. What it sends has the bits that this one would compute, or is refused (PageLayout). Of what a
prompt gets, one page that nobody can foresee is computed here too; where it differs, all of it is processed here.
"""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from tandem.engine.page_copies import PageCopies, PageRow, PageRun
from tandem.engine.prefill_pace import PrefillTimes
from tandem.engine.transfers import REASONS, PrefillFailed, Transfers, Wanted
from tandem.runners.pages import PAGE
from tandem.runners.protocol import PrefillRow

if TYPE_CHECKING:
    from tandem.engine.engine import Engine
    from tandem.engine.sequences import KVSequence

MIN_TOKENS = 256
MOST_SOURCES = 64
"""Most source processes that are remembered; one more begins the list anew."""


class PageSource(Protocol):
    """Where pages come from."""

    def pages(self, wanted: Wanted) -> AsyncGenerator[PageRun, None]:
        """Yields the wanted pages from `wanted.first` on, in order, checked. Raises PrefillFailed if any is missing."""

    def found_wrong(self, source: str, error: PrefillFailed) -> None:
        """Reports that a page of this source is not what this process computes."""

    async def close(self) -> None:
        """Frees what it holds. Transfers must have ended."""


class RemotePrefill:
    """Where an engine has the beginnings of prompts computed of which at least `least` tokens are not held yet.

    Prompts whose pages are under way already wait for them instead of asking again. `chance(n)`: a number below n.
    Totals: `requests` prompts were asked for, of which `shared` waited for another's transfer, for `seconds` in all;
    `pages` came, of so many `bytes`.
    """

    def __init__(
        self,
        engine: Engine,
        source: PageSource,
        copies: PageCopies,
        least: int = MIN_TOKENS,
        chance: Callable[[int], int] = random.randrange,
    ) -> None:
        self._engine, self.source, self.copies, self._least = engine, source, copies, least
        self.chance = chance
        self._sources: set[str] = set()  # processes that pages came from
        self._forgotten = 0  # pages that had come when the prefixes were forgotten
        self.transfers = Transfers(lambda wanted: self.source.pages(wanted))
        self.requests = self.shared = self.pages = self.bytes = 0
        self.seconds, self.fallbacks = 0.0, Counter[str](dict.fromkeys(REASONS, 0))
        self.in_place = PrefillTimes()

    async def measure(self) -> None:
        """Processes a chunk in a free slot, so that it is known from the first prompt on what it would take here."""
        engine = self._engine
        tokens = (0,) * min(engine.runner.limits.chunk, engine.runner.limits.max_length)
        slot = await engine.slots.acquire(tokens=len(tokens))
        try:
            done = await engine.run(engine.runner.prefill, PrefillRow(slot, 0, tokens), prefill=True)
            self.in_place.note(len(tokens), done.compute_seconds)
        finally:
            engine.slots.release(slot)

    async def fill(self, sequence: KVSequence, tokens: Sequence[int]) -> int | None:
        """Fills the sequence's slot with as many pages of `tokens` as come. Raises what steps raise.

        Returns how many tokens were copied from known prefixes before, or None if these were not looked up.
        """
        if len(tokens) - len(sequence.held) < self._least:
            return None
        copied = await self._copy_cached(sequence, tokens)
        if len(tokens) - len(sequence.held) < self._least:
            return copied
        began = time.perf_counter()
        self.requests += 1
        try:
            with self._engine.batcher.excluded_from_wait():
                await self._fetch_pages(sequence, tokens)
        except PrefillFailed as error:
            self.fallbacks[error.reason] += 1
            if error.reason == "corrupt":
                self._forget()
        self.seconds += time.perf_counter() - began
        return copied

    async def close(self) -> None:
        await self.transfers.close()
        await self.source.close()

    async def _copy_cached(self, sequence: KVSequence, tokens: Sequence[int]) -> int | None:
        """Copies cached pages into the sequence; returns the number of tokens copied, None if nothing is cached."""
        prefixes, start = self._engine.prefixes, len(sequence.held)
        if prefixes is None:
            return None
        step = functools.partial(prefixes.copy, sequence.scope, tuple(tokens))
        row = PrefillRow(sequence.slot, start, tuple(tokens[start : start + 1]), sequence.adapter)
        copied: int = (await sequence.step(step, row, prefill=True)).value
        sequence.held += tokens[start : start + copied]
        return copied

    async def _fetch_pages(self, sequence: KVSequence, tokens: Sequence[int]) -> None:
        whole = len(tokens) // PAGE * PAGE
        name, revision = self._engine.adapters.named(sequence.adapter)
        seconds = self.in_place.per_token
        page = None if seconds is None else PAGE * seconds
        wanted = Wanted(sequence.scope, tuple(tokens[:whole]), len(sequence.held) // PAGE, name, revision, page)
        self.shared += self.transfers.runs(wanted)
        came, picked, failed = 0, None, None
        try:
            async with contextlib.aclosing(self.transfers.pages(wanted)) as runs:
                async for run in runs:
                    put = await self._put(sequence, tokens, run)
                    came += len(put.pages)
                    if put.pages and self.chance(came) < len(put.pages):
                        at = self.chance(len(put.pages))
                        picked = PageRun(put.first + at, put.pages[at : at + 1], put.source)
        except PrefillFailed as error:
            failed = error
        if picked:
            await self._compare(sequence, tokens, picked)
        if failed:
            raise failed
        if len(sequence.held) < whole:
            raise PrefillFailed("cut", "the pages ended early")

    async def _compare(self, sequence: KVSequence, tokens: Sequence[int], page: PageRun) -> None:
        """Computes a page here too. If it differs, nothing of what the sequence holds is used: raises PrefillFailed."""
        step = functools.partial(self.copies.agree, tokens, sequence.adapter)
        if not (await sequence.step(step, PageRow(sequence.slot, run=page), prefill=True)).value:
            self._forget()
            sequence.invalidate()
            error = PrefillFailed("wrong", f"page {page.first} of a prompt is not what this target computes")
            self.source.found_wrong(page.source, error)
            raise error

    def _met(self, source: str) -> None:
        """Notes the process that sends. A new one may have replaced another, so what the others sent is forgotten."""
        if source not in self._sources:
            if self._sources:
                self._forget()
            self._sources = {source} if len(self._sources) >= MOST_SOURCES else self._sources | {source}

    def _forget(self) -> None:
        """Forgets the prefixes, if any of them may come from elsewhere."""
        if self._engine.prefixes is not None and self.pages > self._forgotten:
            self._forgotten = self.pages
            self._engine.prefixes.forget(self._engine.batcher)

    async def _put(self, sequence: KVSequence, tokens: Sequence[int], run: PageRun) -> PageRun:
        """Writes what the sequence does not hold of a run to its slot, and returns that."""
        self._met(run.source)
        known = len(sequence.held) // PAGE
        assert run.first <= known, "pages come without gaps"
        run = PageRun(known, run.pages[known - run.first :], run.source)
        if not run.pages:
            return run
        done = await sequence.step(self.copies.into, PageRow(sequence.slot, run=run), prefill=True)
        sequence.queue_seconds += done.queue_seconds
        sequence.compute_seconds += done.compute_seconds
        sequence.held += tokens[len(sequence.held) : run.end * PAGE]
        self.pages += len(run.pages)
        self.bytes += sum(map(len, run.pages))
        return run
