"""Clean-up that a second cancellation does not cut short."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def finish(work: Coroutine[Any, Any, None]) -> None:
    """Awaits `work`, which must end by itself, through any cancellations; then raises the cancellation."""
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
