"""Computes prompts for other processes: chunk by chunk in a slot of its own, whose pages are handed out meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from tandem.engine.engine import Engine
from tandem.engine.page_copies import PageCopies, PageLayout, PageRow, PageRun
from tandem.engine.sequences import KVSequence
from tandem.runners.pages import PAGE
from tandem.speculation.types import Request, SpeculationStats

AHEAD = 4
"""Runs of pages that are computed before the first of them is taken."""


class PrefillPages:
    """Hands out the pages of prompts. `asked`, `pages`: totals since the start."""

    def __init__(self, engine: Engine, copies: PageCopies) -> None:
        self._engine, self._copies = engine, copies
        self.asked = self.pages = 0

    @property
    def layout(self) -> PageLayout:
        return self._copies.layout

    async def of(
        self, tokens: Sequence[int], first: int, request: Request, stats: SpeculationStats
    ) -> AsyncGenerator[PageRun, None]:
        """Yields the pages of `tokens` (whole pages) from number `first` on, in order; `stats` grow meanwhile.

        Waits for a slot; raises NoFreeSlot if too many do, InvalidField if there is no such adapter. Computes up to
        AHEAD runs before they are taken, so that a slow reader stops the work, and only its own.
        """
        self.asked += 1
        async with self._sequence(request, len(tokens)) as sequence:
            ready = asyncio.Queue[PageRun | Exception | None](AHEAD)
            working = asyncio.create_task(self._work(sequence, tokens, first, stats, ready), name="prefill")
            try:
                while (run := await ready.get()) is not None:
                    if isinstance(run, Exception):
                        raise run
                    self.pages += len(run.pages)
                    yield run
            finally:
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def _sequence(self, request: Request, length: int) -> AsyncIterator[KVSequence]:
        """A sequence in a slot, which is left to later sequences and freed at the end."""
        sequence = await KVSequence.admitted(self._engine, request, length)
        try:
            yield sequence
        finally:
            sequence.close()

    async def _work(
        self,
        sequence: KVSequence,
        tokens: Sequence[int],
        first: int,
        stats: SpeculationStats,
        ready: asyncio.Queue[PageRun | Exception | None],
    ) -> None:
        """Puts the pages into `ready` chunk by chunk, then None, or the error."""
        try:
            async with contextlib.aclosing(self._runs(sequence, tokens, first, stats)) as runs:
                async for run in runs:
                    await ready.put(run)
            await ready.put(None)
        except Exception as error:
            await ready.put(error)

    async def _runs(
        self, sequence: KVSequence, tokens: Sequence[int], first: int, stats: SpeculationStats
    ) -> AsyncGenerator[PageRun, None]:
        """Processes the tokens and yields their pages, chunk by chunk."""
        chunk, taken = self._engine.runner.limits.chunk, first
        while len(sequence.held) < len(tokens):
            stats.cached_prompt_tokens += await sequence.fill(tokens[: len(sequence.held) + chunk])
            stats.queue_seconds, stats.prefill_seconds = sequence.queue_seconds, sequence.compute_seconds
            whole = len(sequence.held) // PAGE
            while taken < whole:
                count = min(self._copies.together, whole - taken)
                done = await sequence.step(self._copies.out, PageRow(sequence.slot, taken, count), prefill=True)
                taken += count
                yield done.value
