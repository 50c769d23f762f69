"""Counts running work and refuses new work while draining."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from tandem.services.statuses import NotAccepting


class Lifecycle:
    def __init__(self) -> None:
        self.accepting = True
        self.running = 0

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """Counts work while the block runs. Raises NotAccepting while draining."""
        self.check()
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def check(self) -> None:
        if not self.accepting:
            raise NotAccepting("the server is stopping and takes no new requests")

    async def drain(self, seconds: float, others: Callable[[], int]) -> None:
        """Refuses new work; waits up to `seconds` until none runs and `others()` is 0."""
        self.accepting = False
        deadline = asyncio.get_running_loop().time() + seconds
        while (self.running or others()) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
