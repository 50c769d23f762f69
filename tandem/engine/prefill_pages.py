"""Computes prompts for other processes, chunk by chunk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from tandem.engine.engine import Engine
from tandem.engine.page_copies import PageCopies, PageLayout, PageRow, PageRun
from tandem.engine.sequences import KVSequence
from tandem.runners.pages import PAGE
from tandem.speculation.types import Request


class PrefillPages:
    """Pages of prompts. `asked`, `pages`: totals."""

    def __init__(self, engine: Engine, copies: PageCopies) -> None:
        self._engine, self._copies = engine, copies
        self.asked = self.pages = 0

    @property
    def layout(self) -> PageLayout:
        return self._copies.layout

    async def of(self, tokens: Sequence[int], first: int, request: Request) -> AsyncGenerator[PageRun, None]:
        """Yields whole pages of `tokens` from number `first` on, one run ahead. Raises NoFreeSlot, InvalidField."""
        self.asked += 1
        sequence = await KVSequence.admitted(self._engine, request, len(tokens))
        runs = self._runs(sequence, tokens, first)
        coming = asyncio.ensure_future(_next(runs))
        try:
            while (run := await coming) is not None:
                coming = asyncio.ensure_future(_next(runs))
                self.pages += len(run.pages)
                yield run
        finally:
            coming.cancel()
            try:
                await asyncio.gather(coming, return_exceptions=True)
            finally:  # also if the caller is cancelled again
                sequence.close()

    async def _runs(self, sequence: KVSequence, tokens: Sequence[int], first: int) -> AsyncGenerator[PageRun, None]:
        chunk, taken = self._engine.runner.limits.chunk, first
        while len(sequence.held) < len(tokens):
            await sequence.fill(tokens[: len(sequence.held) + chunk])
            whole = len(sequence.held) // PAGE
            while taken < whole:
                count = min(self._copies.together, whole - taken)
                done = await sequence.step(self._copies.out, PageRow(sequence.slot, taken, count), prefill=True)
                taken += count
                yield done.value


async def _next(runs: AsyncGenerator[PageRun, None]) -> PageRun | None:
    try:
        return await anext(runs)
    except StopAsyncIteration:
        return None
