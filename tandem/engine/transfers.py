"""Shares transfers of pages among the sequences that wait for the same ones. Independent of device and transport.

A transfer runs in a task of its own. It ends when its pages do, or when nobody waits for it any more: a request that is
cancelled takes nothing from the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Hashable
from dataclasses import dataclass

from tandem.engine.page_copies import PageRun

log = logging.getLogger("tandem.engine")

REASONS = ("busy", "corrupt", "cut", "failed", "late", "mismatch", "refused", "slow", "unavailable", "wrong")


class PrefillFailed(Exception):
    """The pages do not come, or no more of them. `reason` is one of REASONS."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Wanted:
    """Pages of a prompt: those of `tokens` (whole pages) from number `first` on, computed with an adapter.

    `scope`: whose prompt it is; the prompts of different scopes are not shared. `in_place`: the seconds that a page
    takes here, if that is known.
    """

    scope: Hashable
    tokens: tuple[int, ...]
    first: int = 0
    adapter: str = ""
    adapter_revision: str = ""
    in_place: float | None = None

    @property
    def key(self) -> Hashable:
        """What is the same for prompts that can wait for each other's pages."""
        return self.scope, self.tokens, self.adapter, self.adapter_revision


class _Transfer:
    """Pages that arrive from number `first` on, for `users` sequences."""

    def __init__(self, first: int, pages: AsyncGenerator[PageRun, None]) -> None:
        self.first, self.users = first, 0
        self._runs: list[PageRun] = []
        self._error: PrefillFailed | None = None
        self._news, self._ended = asyncio.Event(), False
        self.task = asyncio.create_task(self._receive(pages), name="transfer of pages")

    async def _receive(self, pages: AsyncGenerator[PageRun, None]) -> None:
        try:
            async with contextlib.aclosing(pages):
                async for run in pages:
                    self._runs.append(run)
                    self._tell()
        except PrefillFailed as error:
            self._error = error
        except Exception as error:  # a defect; its message may quote the prompt
            log.error("a transfer of pages failed: %s", type(error).__name__)
            self._error = PrefillFailed("failed", type(error).__name__)
        finally:
            self._ended = True
            self._tell()

    def _tell(self) -> None:
        """Wakes all who wait, and lets them wait for the next news."""
        self._news.set()
        self._news = asyncio.Event()

    async def runs(self) -> AsyncGenerator[PageRun, None]:
        """Yields all runs, those that arrived before included. Raises PrefillFailed if the transfer did."""
        given = 0
        while True:
            while given < len(self._runs):
                given += 1
                yield self._runs[given - 1]
            if self._ended:
                break
            await self._news.wait()
        if self._error:
            raise self._error


class Transfers:
    """The transfers that are under way. `begin` makes the pages of a new one."""

    def __init__(self, begin: Callable[[Wanted], AsyncGenerator[PageRun, None]]) -> None:
        self._begin = begin
        self._by_key: dict[Hashable, _Transfer] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._by_key)

    def runs(self, wanted: Wanted) -> bool:
        """Whether the pages are under way already."""
        found = self._by_key.get(wanted.key)
        return found is not None and found.first <= wanted.first

    async def pages(self, wanted: Wanted) -> AsyncGenerator[PageRun, None]:
        """Yields the wanted pages, and maybe some before them. Raises PrefillFailed if not all come."""
        transfer = self._joined(wanted)
        transfer.users += 1
        try:
            async with contextlib.aclosing(transfer.runs()) as runs:
                async for run in runs:
                    yield run
        finally:
            transfer.users -= 1
            if not transfer.users:
                self._end(wanted.key, transfer)

    def _joined(self, wanted: Wanted) -> _Transfer:
        if self.runs(wanted):
            return self._by_key[wanted.key]
        transfer = _Transfer(wanted.first, self._begin(wanted))
        self._by_key[wanted.key] = transfer
        return transfer

    def _end(self, key: Hashable, transfer: _Transfer) -> None:
        """Forgets a transfer that nobody needs any more, and cancels it if it still runs."""
        if self._by_key.get(key) is transfer:
            del self._by_key[key]
        if not transfer.task.done():
            transfer.task.cancel()
            self._ending.add(transfer.task)
            transfer.task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Cancels all transfers and waits until they have ended."""
        running = [*self._ending, *(transfer.task for transfer in self._by_key.values())]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
