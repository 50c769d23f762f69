"""A stream of rounds: read ahead within a bound, handled in order, answered in order."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import TypeVar

Request = TypeVar("Request")
Reply = TypeVar("Reply")

MOST_AHEAD = 16
"""Rounds of one stream that wait here. The transport's flow control holds back what its sender has beyond them."""


async def answered_in_order(
    requests: AsyncIterator[Request],
    answer: Callable[[Request, float], Awaitable[Reply]],
    most_ahead: int = MOST_AHEAD,
) -> AsyncGenerator[Reply, None]:
    """`answer(request, arrived)` of each request; `arrived` is when it was read (perf_counter), perhaps long before.

    An answer that raises ends the stream, after the replies before it. Leaving early ends the reading.
    """
    waiting: asyncio.Queue[tuple[Request, float] | BaseException | None] = asyncio.Queue(most_ahead)
    reading = asyncio.create_task(_read(requests, waiting), name="verify stream")
    try:
        while (item := await waiting.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield await answer(*item)
    finally:
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(reading, return_exceptions=True)


async def _read(
    requests: AsyncIterator[Request], waiting: asyncio.Queue[tuple[Request, float] | BaseException | None]
) -> None:
    try:
        async for request in requests:
            await waiting.put((request, time.perf_counter()))
    except Exception as error:
        await waiting.put(error)
    else:
        await waiting.put(None)
