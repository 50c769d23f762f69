"""Runs coroutines on an event loop in a background thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from tandem.rpc.channel import check_process, forked
from tandem.rpc.received_errors import TandemError

T = TypeVar("T")


class BackgroundLoop:
    """Callable from any thread; Ctrl-C in a caller cancels its work."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._closed, self._process = False, os.getpid()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._closed or forked(self._process):
            work.close()
            check_process(self._process)
            raise closed_error()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise closed_error() from None
        except BaseException:
            future.cancel()
            raise

    def soon(self, call: Callable[..., object], *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(call, *arguments)

    def iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """Yields items as they come; leaving early closes `items`."""
        turn, end = asyncio.Lock(), object()

        async def next_item() -> Any:
            async with turn:  # a step that was cancelled must end before `items` can be closed
                return await anext(items, end)

        async def close_items() -> None:
            async with turn:
                await items.aclose()

        try:
            while (item := self.run(next_item())) is not end:
                yield item
        finally:
            if not self._closed and not forked(self._process):
                closing = asyncio.run_coroutine_threadsafe(close_items(), self._loop)
                if threading.current_thread() is not self._thread:  # the garbage collector may run there
                    concurrent.futures.wait([closing])

    def close(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work`, cancels the rest and ends the thread; no effect again or if forked."""
        if self._closed or forked(self._process):
            work.close()
            return
        self._closed = True
        try:
            asyncio.run_coroutine_threadsafe(work, self._loop).result()
        finally:
            asyncio.run_coroutine_threadsafe(_end_all(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


def run_apart(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine in an event loop of its own, in a thread if a loop runs here."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


async def _end_all() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


def closed_error(produced: tuple[int, ...] = ()) -> TandemError:
    return TandemError("CANCELLED", "the client is closed", reason="CLOSED", produced=produced)
