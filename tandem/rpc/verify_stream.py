"""Implements speculation's FlightVerifier, with several rounds in flight, over the RPC VerifyStream.

If the stream breaks, or its verifier hangs and there is another, only the rounds in flight are lost: the session is
reopened with the committed tokens. With an older server that has no VerifyStream, every round is a unary Verify, one at
a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from tandem.rpc import calls
from tandem.rpc.endpoint_pool import LOST
from tandem.rpc.errors import TandemError, from_rpc
from tandem.rpc.liveness import watch
from tandem.rpc.remote_verifier import RemoteVerifier
from tandem.rpc.request_context import outgoing
from tandem.rpc.stream_status import ENDED_MEANWHILE, StreamStatus
from tandem.speculation.pipeline import MAX_IN_FLIGHT, Answer, RoundsLost
from tandem.speculation.types import Draft, SamplingParams, SpeculationStats
from tandem.v1 import target_verifier_pb2 as pb

log = logging.getLogger("tandem.verifier")

ENDS_SECONDS = 0.1
"""How long a stream's tasks may take to end with their call before they are cancelled."""


class StreamedVerifier:
    """One session of a TargetVerifier, for one request, and the stream of its rounds. Counts bytes into `stats`."""

    def __init__(self, session: RemoteVerifier, stats: SpeculationStats) -> None:
        self._stats, self._session = stats, session
        self._stream: _Stream | None = None
        self._calls: set[asyncio.Task[Any]] = set()

    @property
    def most_in_flight(self) -> int:
        """1 until the first reply of a stream: a second round could hide the server's answer that it has no stream."""
        return MAX_IN_FLIGHT if self._session.endpoint.streams else 1

    async def open(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        await self._session.open(prompt, sampling)

    def send(self, base_length: int, last_token: int, draft: Draft) -> asyncio.Future[Answer]:
        request = self._session.request(base_length, last_token, draft.token_ids, draft.distributions)
        if self._session.endpoint.streams is False:
            return self._keep(asyncio.create_task(self._ask(request), name="verify"))
        if self._stream is None:
            self._stream = _Stream(self._session, self._stats)
        return self._stream.send(request)

    async def _ask(self, request: pb.VerifyRequest) -> Answer:
        try:
            answer = await self._session.ask(request)
        except TandemError as error:
            raise (RoundsLost(error) if error.code in LOST else error) from None
        if answer.verdict is not None:
            self._session.retry_budget.progress()
        return answer

    def _keep(self, call: asyncio.Task[Answer]) -> asyncio.Task[Answer]:
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        call.add_done_callback(_looked_at)
        return call

    async def resume(self, tokens: Sequence[int], cause: Exception) -> None:
        """Reopens the session, unless only the stream was refused. Raises TandemError."""
        refused = self._stream is not None and self._stream.refused
        await self._leave()
        endpoint = self._session.endpoint
        if refused:
            if endpoint.streams is not False:
                log.warning("%s has no VerifyStream: sending one round at a time", endpoint.address)
            endpoint.streams = False
        elif isinstance(cause, TandemError):
            await self._session.reopen(tokens, cause)
        else:
            await self._session.refresh(tokens)

    async def close(self) -> None:
        try:
            await self._leave()
        finally:
            await self._session.close()

    async def _leave(self) -> None:
        stream, self._stream = self._stream, None
        if stream:
            await stream.close()
        for call in self._calls:
            call.cancel()


@dataclass(slots=True)
class _Unanswered:
    answer: asyncio.Future[Answer]
    sent: float
    too_late: asyncio.TimerHandle


class _Stream:
    """One VerifyStream call. Requests are sent as they come; answers arrive in the same order.

    `refused`: the server does not have the method.
    """

    def __init__(self, session: RemoteVerifier, stats: SpeculationStats) -> None:
        self._waits, self._times, self._as_answer = session.waits, session.client.times, session.answer
        self._endpoint, self._retry_budget, self._stats = session.endpoint, session.retry_budget, stats
        self._seconds = session.client.deadlines.verify
        self._call: Any = self._endpoint.stub.VerifyStream(metadata=outgoing())
        self._status = StreamStatus(self._call)
        self._outgoing: asyncio.Queue[pb.VerifyRequest | None] = asyncio.Queue()
        self._unanswered: deque[_Unanswered] = deque()
        self._ended: Exception | None = None
        self.refused = False
        self._heard = 0.0  # when the last answer came
        self._writing = asyncio.create_task(self._write(), name="verify stream")
        self._reading = asyncio.create_task(self._read(), name="verify stream")
        self._watching: asyncio.Task[None] | None = None
        if not session.client.is_only(self._endpoint):
            self._watching = asyncio.create_task(self._watch(), name="verify stream")

    def send(self, request: pb.VerifyRequest) -> asyncio.Future[Answer]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()
        answer.add_done_callback(_looked_at)
        if self._ended:
            answer.set_exception(self._ended)
            return answer
        calls.sent(request, self._stats)
        too_late = loop.call_later(self._retry_budget.limited(self._seconds), _fail, answer, self._no_answer)
        self._unanswered.append(_Unanswered(answer, time.perf_counter(), too_late))
        self._outgoing.put_nowait(request)
        return answer

    def _no_answer(self) -> Exception:
        return RoundsLost(TandemError("DEADLINE_EXCEEDED", f"a round was not answered within {self._seconds:g} s"))

    async def _write(self) -> None:
        """Writes requests. Errors of the stream are reported by `_read`."""
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            while (request := await self._outgoing.get()) is not None:
                await self._call.write(request)

    async def _read(self) -> None:
        try:
            async for reply in self._call:
                if self._ended is None:  # otherwise its round was given up and will be sent again
                    self._take(reply)
            error: Exception = RoundsLost(TandemError("UNAVAILABLE", "the stream of rounds ended"))
        except grpc.RpcError as broken:
            error = self._as_error(from_rpc(self._status.error(broken)))
        self._end(error)

    async def _watch(self) -> None:
        """Gives up the rounds in flight if the verifier hangs."""
        error = await watch("a round", self._endpoint.health, self._quiet, self._waits.silence, self._waits.round)
        self._end(RoundsLost(error))

    def _quiet(self) -> float:
        """Returns how many seconds the oldest round in flight has waited for its answer."""
        if not self._unanswered:
            return 0.0
        return time.perf_counter() - max(self._unanswered[0].sent, self._heard)

    def _as_error(self, error: TandemError) -> Exception:
        self.refused = error.code == "UNIMPLEMENTED"
        if (error.code, error.message) == ENDED_MEANWHILE:  # the real status did not arrive in time
            return RoundsLost(TandemError("UNAVAILABLE", "the stream of rounds broke"))
        return RoundsLost(error) if self.refused or error.code in LOST else error

    def _take(self, reply: pb.VerifyResponse) -> None:
        self._endpoint.streams = True
        if not reply.stale:
            self._retry_budget.progress()
        calls.received(reply, self._stats)
        asked = self._unanswered.popleft()
        asked.too_late.cancel()
        self._heard = time.perf_counter()
        self._times.answered(self._heard - asked.sent)
        if asked.answer.done():
            return
        try:
            asked.answer.set_result(self._as_answer(reply, self._heard - asked.sent))
        except TandemError as error:
            asked.answer.set_exception(error)

    def _end(self, error: Exception) -> None:
        self._ended = self._ended or error
        while self._unanswered:
            asked = self._unanswered.popleft()
            asked.too_late.cancel()
            _fail(asked.answer, lambda: error)

    async def close(self) -> None:
        """Cancels the call and fails its unanswered rounds.

        The tasks that write and read first get `ENDS_SECONDS` to end with the call, because grpc.aio leaks 96 bytes
        for each operation whose task is cancelled. A write that still waits for the call's metadata to be sent does
        not end with the call, and is cancelled then.
        """
        if self._watching:
            self._watching.cancel()
        self._call.cancel()
        self._outgoing.put_nowait(None)
        self._end(RoundsLost(TandemError("CANCELLED", "the stream of rounds was closed")))
        await asyncio.wait({self._reading, self._writing}, timeout=ENDS_SECONDS)
        for task in (self._reading, self._writing):
            task.cancel()
        await asyncio.wait({self._reading, self._writing})


def _fail(answer: asyncio.Future[Answer], error: Callable[[], Exception]) -> None:
    if not answer.done():
        answer.set_exception(error())


def _looked_at(answer: asyncio.Future[Answer]) -> None:
    """Retrieves the exception of an abandoned round, so that asyncio does not log it."""
    if not answer.cancelled():
        answer.exception()
