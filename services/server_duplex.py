"""Server side of bidirectional streams: bounded read-ahead, replies in order or independent of requests."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Generic, TypeVar

Request = TypeVar("Request")
Reply = TypeVar("Reply")

MAX_AHEAD = 16  # requests read ahead per stream; flow control holds back the rest


class StreamIdle(LookupError):
    """The stream was idle for a whole lease; its sessions have expired."""


class Incoming(Generic[Request]):
    """Queues (request, read time by perf_counter). `next` raises StreamIdle after `idle_seconds` while not `busy`."""

    def __init__(self, requests: AsyncIterator[Request], idle_seconds: float) -> None:
        self._waiting: asyncio.Queue[tuple[Request, float] | BaseException | None] = asyncio.Queue(MAX_AHEAD)
        self._closed = False
        # The call's pending read holds the task until it ends.
        asyncio.create_task(self._read(requests), name="read stream")  # noqa: RUF006
        self._idle_seconds = idle_seconds
        self._idle_since: float | None = time.monotonic()  # None: something is busy
        self._look_in(idle_seconds)

    async def next(self) -> tuple[Request, float] | None:
        """Returns the next request, or None at the end of the stream. Raises the reader's error."""
        item = await self._waiting.get()
        if isinstance(item, BaseException):
            raise item
        if self._idle_since is not None:
            self._idle_since = time.monotonic()
        return item

    def busy(self, now: bool) -> None:
        """Sets whether the stream is being served; if so, the idle time does not count."""
        self._idle_since = None if now else time.monotonic()

    def close(self) -> None:
        # Not cancelled: grpc.aio leaks 96 bytes per read whose task is cancelled.
        self._timer.cancel()
        self._closed = True
        while not self._waiting.empty():  # makes room for the reading task, which may wait in put()
            self._waiting.get_nowait()

    async def _read(self, requests: AsyncIterator[Request]) -> None:
        end: Exception | None = None
        try:
            async for request in requests:
                if self._closed:
                    return
                await self._waiting.put((request, time.perf_counter()))
        except Exception as error:
            end = error
        if not self._closed:
            await self._waiting.put(end)

    def _look_in(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        left = self._idle_seconds
        if self._waiting.empty() and self._idle_since is not None:
            left += self._idle_since - time.monotonic()
        if left > 0:
            self._look_in(left)
        else:
            text = f"no round came for {self._idle_seconds:g} s: the sessions have expired"
            self._waiting.put_nowait(StreamIdle(text))


Run = Callable[[Request, float, Incoming[Request]], AsyncGenerator[Reply, None]]
"""Answers a stream from a first request on; arguments: request, its read time, the rest."""


async def answered_in_order(
    requests: AsyncIterator[Request],
    answer: Callable[[Request, float], Awaitable[Reply]],
    idle_seconds: float,
    run: Run[Request, Reply] | None = None,
    begins_run: Callable[[Request], bool] = lambda request: False,
) -> AsyncGenerator[Reply, None]:
    """Answers requests in turn; from the first `begins_run` on, `run` answers. Raises StreamIdle."""
    with contextlib.closing(Incoming(requests, idle_seconds)) as incoming:
        while (item := await incoming.next()) is not None:
            incoming.busy(True)
            if run is not None and begins_run(item[0]):
                async with contextlib.aclosing(run(*item, incoming)) as replies:
                    async for reply in replies:
                        yield reply
                return
            yield await answer(*item)
            incoming.busy(False)


class Duplex(Generic[Request, Reply]):
    """A stream with independent reader and worker tasks. Ends with its requests, its work, or an error of either."""

    def __init__(self) -> None:
        self.ended = False
        self._error: Exception | None = None
        self._news = asyncio.Event()

    def on_request(self, request: Request, arrived: float) -> None:
        """Handles a request read at `arrived` (perf_counter)."""
        raise NotImplementedError

    async def work(self, incoming: Incoming[Request]) -> None:
        """Makes replies, calls `ready` for each, and sets `incoming.busy` while computing."""
        raise NotImplementedError

    def next_reply(self) -> Reply | None:
        raise NotImplementedError

    def ready(self) -> None:
        self._news.set()

    def end(self, error: Exception | None = None) -> None:
        if not self.ended:
            self.ended, self._error = True, error
            self.ready()

    async def replies(self, incoming: Incoming[Request]) -> AsyncGenerator[Reply, None]:
        """Yields the replies. Leaving early ends the work at once."""
        tasks = [
            asyncio.create_task(self._ending(self._read_all, incoming), name="read requests"),
            asyncio.create_task(self._ending(self.work, incoming), name="answer stream"),
        ]
        try:
            while True:
                while (reply := self.next_reply()) is not None:
                    yield reply
                if self.ended:
                    break
                await self._news.wait()
                self._news.clear()
            if self._error:
                raise self._error
        finally:
            self.ended = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read_all(self, incoming: Incoming[Request]) -> None:
        while (item := await incoming.next()) is not None:
            self.on_request(*item)

    async def _ending(self, part: Callable[[Incoming[Request]], Awaitable[None]], incoming: Incoming[Request]) -> None:
        try:
            await part(incoming)
            self.end()
        except Exception as error:
            self.end(error)
