"""Fills slots with pages from another process; processes here whatever does not arrive or has other bits."""

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
    """No pages, or no more, will come. `reason`: one of REASONS."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Wanted:
    """Pages of `tokens` (whole pages) from number `first` on, with an adapter."""

    tokens: tuple[int, ...]
    first: int = 0
    adapter: str = ""
    adapter_revision: str = ""


class PageSource(Protocol):
    """Where pages come from."""

    async def fetch(self, wanted: Wanted, put: Callable[[PageRun], Awaitable[None]]) -> None:
        """Passes checked pages to `put` in order. Raises PrefillFailed if one is missing, or as `put`."""

    async def close(self) -> None:
        """Frees its resources."""


class RemotePrefill:
    """Computes prompts elsewhere if at least `least` of their tokens are not cached; counts totals."""

    def __init__(self, engine: Engine, source: PageSource, copies: PageCopies, least: int = MIN_TOKENS) -> None:
        self._engine, self.source, self._copies, self._least = engine, source, copies, least
        self.requests = self.pages = self.bytes = 0
        self.seconds, self.fallbacks = 0.0, Counter[str](dict.fromkeys(REASONS, 0))

    async def fill(self, sequence: KVSequence, tokens: Sequence[int]) -> int | None:
        """Fills the slot with pages that come; returns the number of tokens from caches, None without a lookup."""
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
        prefixes, start = self._engine.prefixes, len(sequence.held)
        if prefixes is None:
            return None
        step = functools.partial(prefixes.copy, sequence.scope, tuple(tokens))
        row = PrefillRow(sequence.slot, start, tuple(tokens[start : start + 1]), sequence.adapter)
        copied: int = (await sequence.step(step, row, prefill=True)).value
        sequence.held += tokens[start : start + copied]
        return copied

    async def _put(self, sequence: KVSequence, tokens: Sequence[int], first: int, run: PageRun) -> None:
        """Writes a run; computes one page of the first run here too, and raises PrefillFailed if it differs."""
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
