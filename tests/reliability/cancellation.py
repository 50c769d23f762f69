"""Cancels a request at its n-th suspension: counted over all that it awaits, in whichever task of it."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

_HERE: ContextVar[Injection | None] = ContextVar("injection", default=None)


@dataclass(eq=False)
class Injection:
    """Where a request is cancelled: at its `at`-th suspension (from 1).

    `late`: not as it suspends, but in the moment in which what it waits for has come. `again`: once more, so many
    suspensions later. `taken`: it was told in time, and must end by it. `tasks`: all that it began.
    """

    at: int
    late: bool = False
    again: int = 0
    count: int = 0
    taken: bool = False
    request: asyncio.Task[Any] | None = None
    tasks: weakref.WeakSet[asyncio.Task[Any]] = field(default_factory=weakref.WeakSet)

    @property
    def fired(self) -> bool:
        return self.count >= self.at

    @property
    def over(self) -> bool:
        """Nothing that it began goes on."""
        return all(task.done() for task in self.tasks)

    def suspended(self, until: asyncio.Future[Any] | None) -> None:
        self.count += 1
        if self.count == self.at or (self.again and self.count == self.at + self.again):
            if not self.late:
                self._cancel()
            elif until is None:
                asyncio.get_running_loop().call_soon(self._cancel)
            else:
                until.add_done_callback(self._cancel)

    def _cancel(self, _: Any = None) -> None:
        assert self.request is not None
        self.taken |= self.request.cancel()

    @property
    def swallowed(self) -> bool:
        """It was cancelled, and ended as if it were not."""
        assert self.request is not None
        return self.taken and not self.request.cancelled()


class _Watched(Coroutine[Any, Any, Any]):
    """`work`, whose every suspension is told."""

    def __init__(self, work: Coroutine[Any, Any, Any], injection: Injection) -> None:
        self._work, self._injection = work, injection

    def __await__(self) -> Generator[Any, Any, Any]:
        raise NotImplementedError("a task drives it")

    def send(self, value: Any) -> Any:
        return self._told(self._work.send(value))

    def throw(self, *error: Any) -> Any:
        return self._told(self._work.throw(*error))

    def close(self) -> None:
        self._work.close()

    def _told(self, until: asyncio.Future[Any] | None) -> asyncio.Future[Any] | None:
        self._injection.suspended(until)
        return until


def _task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    injection = _HERE.get()
    if injection is None:
        return asyncio.Task(work, loop=loop, **options)
    task = asyncio.Task(_Watched(work, injection), loop=loop, **options)
    injection.tasks.add(task)
    return task


async def injected(request: Callable[[], Coroutine[Any, Any, Any]], injection: Injection) -> None:
    """Runs a request to its end, which is its own or the cancellation."""
    loop = asyncio.get_running_loop()
    loop.set_task_factory(_task)
    token = _HERE.set(injection)
    try:
        injection.request = loop.create_task(request())
    finally:
        _HERE.reset(token)
    with contextlib.suppress(asyncio.CancelledError):
        await injection.request
