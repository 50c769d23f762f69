"""Tracks whether a server accepts new work, and how much work is running."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from tandem.services.errors import NotAccepting


class Lifecycle:
    """Counts running work. After `drain`, new work is refused and running work continues."""

    def __init__(self) -> None:
        self.accepting = True
        self.running = 0
        """Number of running pieces of work."""

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """Counts a new piece of work while the block runs. Raises NotAccepting while the server drains."""
        self.check()
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def check(self) -> None:
        """Raises NotAccepting while the server drains."""
        if not self.accepting:
            raise NotAccepting("the server is stopping and takes no new requests")

    async def drain(self, seconds: float, others: Callable[[], int]) -> None:
        """Refuses new work and waits up to `seconds` until nothing runs and `others()` is 0."""
        self.accepting = False
        deadline = asyncio.get_running_loop().time() + seconds
        while (self.running or others()) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
