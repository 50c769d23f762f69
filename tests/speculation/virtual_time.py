"""An event loop whose clock jumps to the next timer: a minute of waiting takes no time and always the same turns."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """Only for code that waits for timers and futures; nothing else may wake it."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        select = self._selector.select

        def jump(timeout: float | None) -> Any:
            if timeout is None:
                raise RuntimeError("everything waits and no timer is set")
            self._now += timeout
            return select(0)

        self._selector.select = jump

    def time(self) -> float:
        return self._now


def in_virtual_time(work: Coroutine[Any, Any, Any]) -> Any:
    """Like asyncio.run, on a VirtualLoop."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
