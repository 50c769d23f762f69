"""Runs clean-up code to completion, even if the task is cancelled meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def finish(work: Coroutine[Any, Any, None]) -> None:
    """Awaits `work` to its end, however often this task is cancelled meanwhile; then raises the cancellation.

    Without this, a second cancellation (for example a deadline that passes while a failed round is being cleaned up)
    skips the rest of a `finally` block that awaits. `work` runs in a task that nothing else can cancel, so it must end
    by itself.
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
