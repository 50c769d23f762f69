"""Answers a stream of rounds in order, with bounded read-ahead."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

Request = TypeVar("Request")
Reply = TypeVar("Reply")

MAX_AHEAD = 16
"""Rounds of one stream that are read ahead. Flow control of the transport holds back further ones."""


class StreamIdle(LookupError):
    """No round came for so long that the stream's sessions have expired."""


async def answered_in_order(
    requests: AsyncIterator[Request],
    answer: Callable[[Request, float], Awaitable[Reply]],
    idle_seconds: float,
    most_ahead: int = MAX_AHEAD,
) -> AsyncGenerator[Reply, None]:
    """Yields `answer(request, arrived)` for each request; `arrived` is when it was read (perf_counter).

    If `answer` raises, the stream ends after the earlier replies. Raises StreamIdle if no request comes for
    `idle_seconds` after the last reply.

    If the caller of this generator leaves early, the task that reads requests is not cancelled but ends with the gRPC
    call, because grpc.aio leaks 96 bytes for each read whose task is cancelled.
    """
    waiting: asyncio.Queue[tuple[Request, float] | BaseException | None] = asyncio.Queue(most_ahead)
    left = asyncio.Event()
    # The call's pending read holds the task until it ends.
    asyncio.create_task(_read(requests, waiting, left), name="verify stream")  # noqa: RUF006
    idle = _Idle(idle_seconds, waiting)
    try:
        while (item := await waiting.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            idle.since = None
            yield await answer(*item)
            idle.since = time.monotonic()
    finally:
        idle.timer.cancel()
        left.set()
        while not waiting.empty():  # makes room for the reading task, which may wait in put()
            waiting.get_nowait()


class _Idle:
    """Puts StreamIdle into the queue if no round comes for `seconds`. `since` None: a round is being answered.

    The timer is set about once per `seconds`, not once per round.
    """

    def __init__(self, seconds: float, waiting: asyncio.Queue[Any]) -> None:
        self._seconds, self._waiting = seconds, waiting
        self.since: float | None = time.monotonic()
        self._set(seconds)

    def _set(self, seconds: float) -> None:
        self.timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        busy = not self._waiting.empty()
        left = self._seconds if busy or self.since is None else self.since + self._seconds - time.monotonic()
        if left > 0:
            self._set(left)
        else:
            self._waiting.put_nowait(StreamIdle(f"no round came for {self._seconds:g} s: the sessions have expired"))


async def _read(
    requests: AsyncIterator[Request],
    waiting: asyncio.Queue[tuple[Request, float] | BaseException | None],
    left: asyncio.Event,
) -> None:
    end: Exception | None = None
    try:
        async for request in requests:
            if left.is_set():
                return
            await waiting.put((request, time.perf_counter()))
    except Exception as error:
        end = error
    if not left.is_set():
        await waiting.put(end)
