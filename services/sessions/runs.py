"""Runs one session without waiting for drafts: one task hears the client's messages, another steps on.

Neither waits for the other, nor for the replies to be sent: the run's limits bound how many replies can wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from tandem.speculation.run_on import RunMessage, RunOn

Request = TypeVar("Request")
Reply = TypeVar("Reply")
Message = TypeVar("Message", covariant=True)


class Requests(Protocol[Message]):
    """The requests that follow a run's first one."""

    async def next(self) -> tuple[Message, float] | None:
        """Returns the next request and when it was read; None at their end."""

    def busy(self, now: bool) -> None:
        """Tells whether the run is stepping now."""


class Superseded(Exception):
    """Other calls have committed or reset the session's tokens, so its run is over."""


class SessionRun(Generic[Request, Reply]):
    """The run of one session, for one stream. `run` holds its drafts and limits.

    `check` turns a request into the run's message, or raises. `step` verifies a draft and commits what the target says,
    or raises Superseded.
    """

    def __init__(
        self,
        run: RunOn,
        check: Callable[[Request], RunMessage],
        step: Callable[[tuple[int, ...]], Awaitable[Reply]],
    ) -> None:
        self.run, self._check, self._step = run, check, step
        self.heard = 0.0
        self._replies: asyncio.Queue[Reply | Exception | None] = asyncio.Queue()
        self._news = asyncio.Event()
        self._ended = False

    def hear(self, message: RunMessage, arrived: float) -> None:
        """Takes a checked message that was read at `arrived`."""
        self.run.hear(message)
        self.heard = arrived
        self._news.set()

    def end(self, error: Exception | None = None) -> None:
        """Ends the run after the step under way, if there is one, with an error or with the stream."""
        if not self._ended:
            self._ended = True
            self._replies.put_nowait(error)
            self._news.set()

    async def replies(self, requests: Requests[Request]) -> AsyncGenerator[Reply, None]:
        """Yields the reply to every step. Leaving early ends the run at once."""
        tasks = [
            asyncio.create_task(self._hear_all(requests), name="hear run"),
            asyncio.create_task(self._go_on(requests), name="run session"),
        ]
        try:
            while (reply := await self._replies.get()) is not None:
                if isinstance(reply, Exception):
                    raise reply
                yield reply
        finally:
            self._ended = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _hear_all(self, requests: Requests[Request]) -> None:
        try:
            while (item := await requests.next()) is not None:
                request, arrived = item
                self.hear(self._check(request), arrived)
            self.end()
        except Exception as error:
            self.end(error)

    async def _go_on(self, requests: Requests[Request]) -> None:
        try:
            while not self._ended:
                draft = self.run.next_draft()
                if draft is None:
                    requests.busy(False)
                    self._news.clear()
                    await self._news.wait()
                    requests.busy(True)
                    continue
                self._replies.put_nowait(await self._step(draft))
        except Superseded:
            self.end()
        except Exception as error:
            self.end(error)
