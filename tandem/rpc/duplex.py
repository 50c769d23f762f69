"""The client's side of a call that streams both ways: a task writes, a task reads, and it ends once, with an error."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import grpc

from tandem.rpc import calls
from tandem.rpc.errors import BrokenContract, TandemError, from_rpc
from tandem.rpc.stream_status import ENDED_MEANWHILE, StreamStatus
from tandem.speculation.types import InvalidField

Request = TypeVar("Request")
Reply = TypeVar("Reply")

ENDS_SECONDS = 0.1
"""How long a stream's tasks may take to end with their call before they are cancelled."""
_SENT_KEPT = 1024
"""Most messages whose sending times are kept."""


class Duplex(ABC, Generic[Request, Reply]):
    """One call. A subclass says what is written, what a reply means, and how long the server has owed one.

    It ends with the server's error, with what `_take` raises (InvalidField: `who` broke the contract), after `seconds`
    in which the server owed a reply, or with what `watching` returns. `limited` shortens a wait to the request's
    deadline. Counts bytes into `stats`. `news` is set when there may be a message to write.
    """

    what = "the stream"
    """Its name in errors."""

    def __init__(
        self,
        who: str,
        call: Any,
        stats: calls.ByteCounts,
        seconds: float,
        limited: Callable[[float], float] = float,
        watching: Callable[[], Awaitable[TandemError]] | None = None,
    ) -> None:
        self._who, self._call, self._stats, self._seconds, self._limited = who, call, stats, seconds, limited
        self.news = asyncio.Event()
        self._status = StreamStatus(call)
        self.ended: Exception | None = None
        self._in_write = False
        self._late = asyncio.get_running_loop().call_later(limited(seconds), self._look)
        self._writing = asyncio.create_task(self._write(), name=self.what)
        self._reading = asyncio.create_task(self._read(), name=self.what)
        self._watching = asyncio.create_task(self._watch(watching), name=self.what) if watching else None

    @abstractmethod
    def _next(self) -> Request | None:
        """Returns the next message to write, if there is one."""

    @abstractmethod
    def _take(self, reply: Reply) -> None:
        """Uses a reply. What it raises ends the stream."""

    @abstractmethod
    def _owed(self) -> float:
        """Returns how many seconds the server has owed a reply."""

    @abstractmethod
    def _over(self, error: Exception) -> None:
        """Called once, when the stream ends."""

    async def close(self) -> None:
        """Cancels the call.

        A task in an operation of the call first gets `ENDS_SECONDS` to end with it, because grpc.aio leaks 96 bytes for
        each operation whose task is cancelled. A write that still waits for the call's metadata to be sent does not end
        with the call, and is cancelled then.
        """
        self._late.cancel()
        if self._watching:
            self._watching.cancel()
        self._call.cancel()
        self._end(TandemError("CANCELLED", f"{self.what} was closed"))
        if not self._in_write:
            self._writing.cancel()
        tasks = {self._reading, self._writing}
        try:
            await asyncio.wait(tasks, timeout=ENDS_SECONDS)
        finally:  # also where the request is cancelled meanwhile
            for task in tasks:
                task.cancel()
        await asyncio.wait(tasks)

    def _end(self, error: Exception) -> None:
        if self.ended is None:
            self.ended = error
            self._over(error)

    async def _write(self) -> None:
        """Writes messages. Errors of the call are reported by `_read`."""
        try:
            while True:
                await self.news.wait()
                self.news.clear()
                while (request := self._next()) is not None:
                    self._in_write = True
                    await self._call.write(calls.sent(request, self._stats))
                    self._in_write = False
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass
        except Exception as error:
            self._end(error)

    async def _read(self) -> None:
        error: Exception
        try:
            async for reply in self._call:
                if self.ended is None:  # otherwise what it answers was given up
                    self._take(calls.received(reply, self._stats))
            error = TandemError("UNAVAILABLE", f"{self.what} ended")
        except grpc.RpcError as broken:
            error = from_rpc(self._status.error(broken))
            if (error.code, error.message) == ENDED_MEANWHILE:  # the real status did not arrive in time
                error = TandemError("UNAVAILABLE", f"{self.what} broke")
        except InvalidField as broken_contract:
            error = BrokenContract(self._who, broken_contract)
        except Exception as unusable:  # a reply that cannot be used ends its request, and is never waited for
            error = unusable
        self._end(error)

    def _look(self) -> None:
        """Ends the stream if a reply is overdue."""
        left = self._limited(self._seconds) - self._owed()
        if left > 0:
            self._late = asyncio.get_running_loop().call_later(left, self._look)
        else:
            self._end(TandemError("DEADLINE_EXCEEDED", f"{self.what}: no answer came within {self._seconds:g} s"))

    async def _watch(self, watching: Callable[[], Awaitable[TandemError]]) -> None:
        self._end(await watching())


class RoundTrips:
    """When the messages of a stream were sent, by number, to measure round trips."""

    def __init__(self) -> None:
        self.sent = 0
        """Messages sent so far."""
        self._sent_at: dict[int, float] = {}

    def sending(self) -> None:
        """Records that the next message is sent now."""
        self.sent += 1
        if len(self._sent_at) < _SENT_KEPT:
            self._sent_at[self.sent] = time.perf_counter()

    def owed(self) -> float:
        """Returns how many seconds the oldest unanswered message has waited."""
        now = time.perf_counter()
        return now - min(self._sent_at.values(), default=now)

    def answered(self, number: int, server_seconds: float, again: bool = False) -> float | None:
        """Returns the seconds that the network took for message `number` and its answer; None if it is not known.

        `again`: further answers to the message may follow, and are measured too.
        """
        sent = self._sent_at.get(number)
        for one in [one for one in self._sent_at if one < number or (one == number and not again)]:
            del self._sent_at[one]
        return None if sent is None else max(0.0, time.perf_counter() - sent - server_seconds)
