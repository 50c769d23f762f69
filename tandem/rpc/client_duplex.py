"""Client side of bidirectional streams: a writing and a reading task, one end."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

import grpc

from tandem.rpc.channel import received, sent
from tandem.rpc.received_errors import BrokenContract, TandemError, from_rpc
from tandem.speculation.types import InvalidField, SpeculationStats

Request = TypeVar("Request")
Reply = TypeVar("Reply")

ENDS_SECONDS = 0.1  # for a stream's tasks to end before they are cancelled
_SENT_KEPT = 1024  # messages with known sending times


class ClientDuplex(ABC, Generic[Request, Reply]):
    """One call. Ends with the server's error, that of `_take`, or `patience()` seconds without an owed reply.

    `who`: the server, for errors. `stats` counts bytes. Set `news` when a message may be ready.
    """

    what = "the stream"  # in errors

    def __init__(self, who: str, call: Any, stats: SpeculationStats, patience: Callable[[], float]) -> None:
        self._who, self._call, self._stats, self._patience = who, call, stats, patience
        self.news = asyncio.Event()
        self._status = StreamStatus(call)
        self.ended: Exception | None = None
        self._in_write = False
        self._late = asyncio.get_running_loop().call_later(patience(), self._look)
        self._writing = asyncio.create_task(self._write(), name=self.what)
        self._reading = asyncio.create_task(self._read(), name=self.what)

    @abstractmethod
    def _next(self) -> Request | None:
        """Returns the next message, if one is ready."""

    @abstractmethod
    def _take(self, reply: Reply) -> None:
        """Handles a reply; its errors end the stream."""

    @abstractmethod
    def _owed(self) -> float:
        """Returns the seconds that the server has owed a reply."""

    @abstractmethod
    def _over(self, error: Exception) -> None:
        """Called once, at the end."""

    async def close(self) -> None:
        # Tasks first get ENDS_SECONDS: grpc.aio leaks 96 bytes per operation whose task is cancelled.
        self._late.cancel()
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
        try:
            while True:
                await self.news.wait()
                self.news.clear()
                while (request := self._next()) is not None:
                    self._in_write = True
                    await self._call.write(sent(request, self._stats))
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
                    self._take(received(reply, self._stats))
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
        patience = self._patience()
        left = patience - self._owed()
        if left > 0:
            self._late = asyncio.get_running_loop().call_later(left, self._look)
        else:
            self._end(TandemError("DEADLINE_EXCEEDED", f"{self.what}: no answer came within {patience:.1f} s"))


class RoundTrips:
    def __init__(self) -> None:
        self.sent = 0
        self._sent_at: dict[int, float] = {}

    def sending(self) -> None:
        self.sent += 1
        if len(self._sent_at) < _SENT_KEPT:
            self._sent_at[self.sent] = time.perf_counter()

    def owed(self) -> float:
        now = time.perf_counter()
        return now - min(self._sent_at.values(), default=now)

    def answered(self, number: int, server_seconds: float, again: bool = False) -> float | None:
        """Returns the network seconds of message `number`, if known; `again`: more answers may follow."""
        sent = self._sent_at.get(number)
        for one in [one for one in self._sent_at if one < number or (one == number and not again)]:
            del self._sent_at[one]
        return None if sent is None else max(0.0, time.perf_counter() - sent - server_seconds)


ENDED_MEANWHILE = ("INTERNAL", "Internal error from Core")  # grpc.aio's replacement

Value = TypeVar("Value")


class StreamStatus:
    """Keeps a stream's status: grpc.aio (1.71 to 1.85) makes it INTERNAL if a message is written after the end."""

    def __init__(self, call: Any) -> None:
        self._kept: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._keep)

    def error(self, raised: grpc.RpcError) -> grpc.RpcError:
        return self._kept or raised

    def _keep(self, call: Any) -> None:
        code, message = _result(call.code()), _result(call.details())
        if code not in (None, grpc.StatusCode.OK) and (code.name, message) != ENDED_MEANWHILE:
            initial, trailing = _result(call.initial_metadata()), _result(call.trailing_metadata())
            self._kept = grpc.aio.AioRpcError(code, initial, trailing, message)


def _result(coroutine: Coroutine[Any, Any, Value]) -> Value | None:
    # A finished call's coroutine returns without waiting.
    try:
        coroutine.send(None)
    except StopIteration as returned:
        value: Value = returned.value
        return value
    coroutine.close()
    return None
