"""Answers a stream of rounds in order, with bounded read-ahead, and hands streams that are runs over."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, Generic, TypeVar

Request = TypeVar("Request")
Reply = TypeVar("Reply")

MAX_AHEAD = 16
"""Rounds of one stream that are read ahead. Flow control of the transport holds back further ones."""


class StreamIdle(LookupError):
    """No round came for so long that the stream's sessions have expired."""


class Incoming(Generic[Request]):
    """The requests of one stream, read ahead, each with the time at which it was read (perf_counter).

    `next` raises StreamIdle if no request comes for `idle_seconds` while nothing is `busy`.
    """

    def __init__(self, requests: AsyncIterator[Request], idle_seconds: float, most_ahead: int = MAX_AHEAD) -> None:
        self._waiting: asyncio.Queue[tuple[Request, float] | BaseException | None] = asyncio.Queue(most_ahead)
        self._left = asyncio.Event()
        # The call's pending read holds the task until it ends.
        asyncio.create_task(_read(requests, self._waiting, self._left), name="verify stream")  # noqa: RUF006
        self._idle = _Idle(idle_seconds, self._waiting)

    async def next(self) -> tuple[Request, float] | None:
        """Returns the next request, or None at the end of the stream. Raises what reading raised."""
        item = await self._waiting.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def busy(self, now: bool) -> None:
        """Tells whether something is being computed for the stream now."""
        self._idle.since = None if now else time.monotonic()

    def leave(self) -> None:
        """Stops reading.

        The task that reads is not cancelled but ends with the gRPC call, because grpc.aio leaks 96 bytes for each read
        whose task is cancelled.
        """
        self._idle.timer.cancel()
        self._left.set()
        while not self._waiting.empty():  # makes room for the reading task, which may wait in put()
            self._waiting.get_nowait()


Run = Callable[[Request, float, Incoming[Request]], AsyncGenerator[Reply, None]]
"""Answers a stream from a first request on, which was read at a time (perf_counter)."""


async def answered_in_order(
    requests: AsyncIterator[Request],
    answer: Callable[[Request, float], Awaitable[Reply]],
    idle_seconds: float,
    most_ahead: int = MAX_AHEAD,
    run: Run[Request, Reply] | None = None,
    begins_run: Callable[[Request], bool] = lambda request: False,
) -> AsyncGenerator[Reply, None]:
    """Yields `answer(request, arrived)` for each request; `arrived` is when it was read (perf_counter).

    From a request on that `begins_run`, `run` answers instead. If `answer` raises, the stream ends after the earlier
    replies. Raises StreamIdle if no request comes for `idle_seconds` after the last reply.
    """
    incoming = Incoming(requests, idle_seconds, most_ahead)
    try:
        while (item := await incoming.next()) is not None:
            incoming.busy(True)
            if run is not None and begins_run(item[0]):
                async with contextlib.aclosing(run(*item, incoming)) as replies:
                    async for reply in replies:
                        yield reply
                return
            yield await answer(*item)
            incoming.busy(False)
    finally:
        incoming.leave()


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
