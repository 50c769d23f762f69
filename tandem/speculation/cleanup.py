"""What an end has to do, done whole: a cancellation that comes meanwhile waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def finish(work: Coroutine[Any, Any, None]) -> None:
    """Awaits `work` to its end, however often this task is cancelled meanwhile; then raises the cancellation.

    A `finally` that awaits is where a second cancellation skips what comes after: a deadline that passes while a failed
    round is being cleaned up, say. `work` runs in a task of its own that nobody else knows, so it must end by itself.
    """
    task = asyncio.create_task(work, name="finish")
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    failed = None if task.cancelled() else task.exception()
    if cancelled is not None:
        raise cancelled
    if failed is not None:
        raise failed
