"""Fills slots with pages that another process computes, while the steps of other rows go on here.

The last tokens of a prompt are always processed here, and so is whatever does not arrive: a request never fails because
of the other process. What it sends has the bits that this one would compute, or is refused (PageLayout).
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tandem.engine.page_copies import PageCopies, PageRow, PageRun
from tandem.engine.prefix_cache import Filled
from tandem.engine.transfers import REASONS, PrefillFailed, Transfers, Wanted
from tandem.runners.pages import PAGE
from tandem.runners.protocol import PrefillRow

if TYPE_CHECKING:
    from tandem.engine.sequences import Engine, KVSequence

MIN_TOKENS = 256


class PageSource(Protocol):
    """Where pages come from."""

    def pages(self, wanted: Wanted) -> AsyncGenerator[PageRun, None]:
        """Yields the wanted pages from `wanted.first` on, in order, checked. Raises PrefillFailed if any is missing."""

    async def close(self) -> None:
        """Frees what it holds. Transfers must have ended."""


@dataclass(slots=True)
class PrefillCounts:
    """What came from elsewhere. `requests`: prompts asked for; `shared`: those that waited for another's transfer."""

    requests: int = 0
    shared: int = 0
    pages: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Brought:
    """How a slot was filled before the rest is processed here.

    `copied`: tokens from known prefixes. `looked`: these were looked up.
    """

    copied: int = 0
    looked: bool = False


class PrefillElsewhere:
    """Where an engine has the beginnings of prompts computed of which at least `least` tokens are not held yet.

    Prompts whose pages are under way already wait for them instead of asking again.
    """

    def __init__(self, engine: Engine, source: PageSource, copies: PageCopies, least: int = MIN_TOKENS) -> None:
        self._engine, self._source, self._copies, self._least = engine, source, copies, least
        self.transfers = Transfers(lambda wanted: self._source.pages(wanted))
        self.counts, self.fallbacks = PrefillCounts(), Counter[str](dict.fromkeys(REASONS, 0))

    async def fill(self, sequence: KVSequence, tokens: Sequence[int]) -> Brought:
        """Fills the sequence's slot with as many pages of `tokens` as come. Raises what steps raise."""
        if len(tokens) - len(sequence.held) < self._least:
            return Brought()
        copied = await self._known(sequence, tokens)
        brought = Brought(copied, self._engine.prefixes is not None)
        if len(tokens) - len(sequence.held) < self._least:
            return brought
        began = time.perf_counter()
        self.counts.requests += 1
        try:
            with self._engine.batcher.away():
                await self._bring(sequence, tokens)
        except PrefillFailed as error:
            self.fallbacks[error.reason] += 1
        self.counts.seconds += time.perf_counter() - began
        return brought

    async def close(self) -> None:
        await self.transfers.close()
        await self._source.close()

    async def _known(self, sequence: KVSequence, tokens: Sequence[int]) -> int:
        """Copies what is known of the tokens here; returns how many it were."""
        prefixes, start = self._engine.prefixes, len(sequence.held)
        if prefixes is None:
            return 0
        step = functools.partial(prefixes.copy, sequence.scope, tuple(tokens))
        row = PrefillRow(sequence.slot, start, tuple(tokens[start : start + 1]), sequence.adapter)
        filled: Filled = (await sequence.step(step, row, prefill=True)).value
        sequence.held += tokens[start : filled.held]
        return filled.copied

    async def _bring(self, sequence: KVSequence, tokens: Sequence[int]) -> None:
        whole = len(tokens) // PAGE * PAGE
        name, revision = self._engine.adapters.named(sequence.adapter)
        wanted = Wanted(sequence.scope, tuple(tokens[:whole]), len(sequence.held) // PAGE, name, revision)
        self.counts.shared += self.transfers.runs(wanted)
        async with contextlib.aclosing(self.transfers.pages(wanted)) as runs:
            async for run in runs:
                await self._put(sequence, tokens, run)
        if len(sequence.held) < whole:
            raise PrefillFailed("cut", "the pages ended early")

    async def _put(self, sequence: KVSequence, tokens: Sequence[int], run: PageRun) -> None:
        """Writes what the sequence does not hold of a run to its slot."""
        known = len(sequence.held) // PAGE
        if run.end <= known:
            return
        assert run.first <= known, "pages come without gaps"
        run = PageRun(known, run.pages[known - run.first :])
        step = functools.partial(
            self._copies.into, self._engine.prefixes, sequence.scope, tuple(tokens[: run.end * PAGE])
        )
        done = await sequence.step(step, PageRow(sequence.slot, run=run), prefill=True)
        sequence.queue_seconds += done.queue_seconds
        sequence.compute_seconds += done.compute_seconds
        sequence.held += tokens[len(sequence.held) : run.end * PAGE]
        self.counts.pages += len(run.pages)
        self.counts.bytes += sum(map(len, run.pages))
