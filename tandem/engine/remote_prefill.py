"""Fills slots with pages that another process computes, while the steps of other rows go on here.

The last tokens of a prompt are always processed here, and so is whatever does not arrive: a request never fails because
of the other process. Its pages have the bits of this process, or are refused (PageLayout).
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tandem.engine.page_copies import PageCopies, PageRow, PageRun
from tandem.runners.pages import PAGE
from tandem.runners.protocol import PrefillRow

if TYPE_CHECKING:
    from tandem.engine.engine import Engine
    from tandem.engine.sequences import KVSequence

MIN_TOKENS = 256
REASONS = ("busy", "corrupt", "cut", "failed", "late", "mismatch", "refused", "unavailable", "wrong")


class PrefillFailed(Exception):
    """The pages do not come, or no more of them. `reason` is one of REASONS."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Wanted:
    """Pages of a prompt: those of `tokens` (whole pages) from number `first` on, computed with an adapter."""

    tokens: tuple[int, ...]
    first: int = 0
    adapter: str = ""
    adapter_revision: str = ""


class PageSource(Protocol):
    """Where pages come from."""

    async def fetch(self, wanted: Wanted, put: Callable[[PageRun], Awaitable[None]]) -> None:
        """Passes the wanted pages to `put` in order, checked. Raises PrefillFailed if any is missing, or as `put`."""

    async def close(self) -> None:
        """Frees what it holds."""


class RemotePrefill:
    """Has the beginnings of an engine's prompts computed elsewhere if at least `least` of their tokens are not held.

    Totals: `requests` prompts, `pages` and `bytes` that came, `seconds` of waiting, `fallbacks` by reason.
    """

    def __init__(self, engine: Engine, source: PageSource, copies: PageCopies, least: int = MIN_TOKENS) -> None:
        self._engine, self.source, self._copies, self._least = engine, source, copies, least
        self.requests = self.pages = self.bytes = 0
        self.seconds, self.fallbacks = 0.0, Counter[str](dict.fromkeys(REASONS, 0))

    async def fill(self, sequence: KVSequence, tokens: Sequence[int]) -> int | None:
        """Fills the sequence's slot with as many pages of `tokens` as come. Raises what steps raise.

        Returns how many tokens were copied from known prefixes before, or None if these were not looked up.
        """
        if len(tokens) - len(sequence.held) < self._least:
            return None
        copied = await self._copy_cached(sequence, tokens)
        if len(tokens) - len(sequence.held) < self._least:
            return copied
        name, revision = self._engine.adapters.named(sequence.adapter)
        whole, known = len(tokens) // PAGE * PAGE, len(sequence.held) // PAGE
        put = functools.partial(self._put, sequence, tokens, known)
        began = time.perf_counter()
        self.requests += 1
        try:
            with self._engine.batcher.excluded_from_wait():
                await self.source.fetch(Wanted(tuple(tokens[:whole]), known, name, revision), put)
        except PrefillFailed as error:
            self.fallbacks[error.reason] += 1
        self.seconds += time.perf_counter() - began
        return copied

    async def close(self) -> None:
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

    async def _put(self, sequence: KVSequence, tokens: Sequence[int], first: int, run: PageRun) -> None:
        """Writes a run to the sequence's slot. Of the run that begins at page `first`, one page is computed here too.

        If that differs, nothing of the run is used: raises PrefillFailed.
        """
        done = await sequence.step(self._copies.into, PageRow(sequence.slot, run=run), prefill=True)
        sequence.queue_seconds += done.queue_seconds
        sequence.compute_seconds += done.compute_seconds
        sequence.held[run.first * PAGE :] = tokens[run.first * PAGE : run.end * PAGE]
        self.pages += len(run.pages)
        self.bytes += sum(map(len, run.pages))
        if run.first == first:
            last = PageRow(sequence.slot, run=PageRun(run.end - 1, run.pages[-1:]))
            step = functools.partial(self._copies.agree, tokens, sequence.adapter)
            if not (await sequence.step(step, last, prefill=True)).value:
                sequence.invalidate()
                raise PrefillFailed("wrong", f"page {run.end - 1} of a prompt is not what this target computes")
