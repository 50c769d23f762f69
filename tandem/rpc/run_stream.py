"""Implements speculation's RunVerifier over the RPC VerifyStream: a session whose target never waits.

If the stream breaks, or its verifier hangs and there is another, only steps that were not read are lost: the session is
reopened with the committed tokens. A server that does not run sessions, met at a failover, is asked for one step after
the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Sequence
from typing import Any

import grpc

from tandem.rpc import calls
from tandem.rpc.endpoint_pool import LOST
from tandem.rpc.errors import TandemError, from_rpc
from tandem.rpc.liveness import watch
from tandem.rpc.remote_verifier import RemoteVerifier
from tandem.rpc.request_context import outgoing
from tandem.rpc.stream_status import ENDED_MEANWHILE, StreamStatus
from tandem.rpc.verify_stream import ENDS_SECONDS
from tandem.rpc.wire_runs import run_message_to_wire, run_step_from_wire
from tandem.speculation.never_waiting import RunStep
from tandem.speculation.pipeline import OutOfStep, RoundsLost
from tandem.speculation.run_on import MAX_UNREAD, RunMessage, RunOn
from tandem.speculation.types import SamplingParams, SpeculationStats
from tandem.v1 import target_verifier_pb2 as pb

_SENT_KEPT = 1024
"""Messages whose sending times are kept, to measure round trips."""


class RunningVerifier:
    """One run of a session of a TargetVerifier. It ends at a token of `stops`. Counts bytes into `stats`."""

    def __init__(self, session: RemoteVerifier, stats: SpeculationStats, stops: Collection[int] = ()) -> None:
        self._session, self._stats, self._stops = session, stats, sorted(stops)
        self._length = self._until = 0
        self._stopped = self._lost = False
        self._stream: _RunStream | None = None
        self._alone: _OneByOne | None = None

    @property
    def window(self) -> int:
        return self._session.max_unread or MAX_UNREAD

    async def open(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        await self._session.open(prompt, sampling)

    def begin(self, tokens: Sequence[int]) -> None:
        self._length, self._stopped = len(tokens), False
        if self._session.max_unread:
            self._stream = _RunStream(self._session, self._stats, self._stops)
        else:
            self._alone = _OneByOne(self._session, tokens, self._stops)

    def send(self, message: RunMessage) -> None:
        self._until = message.run_until
        if self._alone:
            self._alone.hear(message)
        else:
            assert self._stream, "begin comes first"
            self._stream.send(message)

    async def step(self) -> RunStep:
        assert self._stream or self._alone, "begin comes first"
        step = await (self._stream.next() if self._stream else self._alone.next())  # type: ignore[union-attr]
        self._session.retry_budget.progress()
        self._session.count_step()
        self._length += len(step.verdict.token_ids)
        self._stopped = self._stopped or not set(self._stops).isdisjoint(step.verdict.token_ids)
        return step

    async def resume(self, tokens: Sequence[int], cause: Exception) -> None:
        """Reopens the session. Raises TandemError."""
        self._lost = True
        await self._leave()
        if isinstance(cause, TandemError):
            await self._session.reopen(tokens, cause)
        else:
            await self._session.refresh(tokens)

    async def close(self) -> None:
        """Closes the session. Only if the target has run on is the answer waited for, which says how far.

        So it has if a run was lost, with the steps that were not read.
        """
        ran_on = self._lost or (not self._stopped and self._length < self._until)
        try:
            await self._leave()
        finally:
            await self._session.close(wait=ran_on)

    async def _leave(self) -> None:
        stream, self._stream, self._alone = self._stream, None, None
        if stream:
            await stream.close()


class _OneByOne:
    """Steps of a server that does not run sessions: what is drafted when a step is asked for is verified."""

    def __init__(self, session: RemoteVerifier, tokens: Sequence[int], stops: Collection[int]) -> None:
        self._session, self._tokens = session, list(tokens)
        self._run, self._news = RunOn(tokens, stops), asyncio.Event()

    def hear(self, message: RunMessage) -> None:
        self._run.hear(message)
        self._news.set()

    async def next(self) -> RunStep:
        while (draft := self._run.next_draft()) is None:
            self._news.clear()
            await self._news.wait()
        request = self._session.request(len(self._tokens), self._tokens[-1], draft)
        try:
            answer = await self._session.ask(request)
        except TandemError as error:
            raise (RoundsLost(error) if error.code in LOST else error) from None
        if answer.verdict is None:
            raise RoundsLost(OutOfStep(f"the verifier holds {answer.committed_length} tokens"))
        self._tokens += answer.verdict.token_ids
        self._run.commit(answer.verdict.token_ids)
        return RunStep(answer.verdict, len(draft), answer.network_seconds)


class _RunStream:
    """One VerifyStream call that is a run.

    A message that was not written yet is replaced by a newer one, which acknowledges and drafts at least as much.
    """

    def __init__(self, session: RemoteVerifier, stats: SpeculationStats, stops: Collection[int]) -> None:
        self._session, self._stats, self._stops = session, stats, stops
        self._endpoint = session.endpoint
        self._call: Any = self._endpoint.stub.VerifyStream(metadata=outgoing())
        self._status = StreamStatus(self._call)
        self._next: pb.VerifyRequest | None = None
        self._news = asyncio.Event()
        self._steps: asyncio.Queue[RunStep | Exception] = asyncio.Queue()
        self._ended: Exception | None = None
        self._written = 0
        self._sent_at: dict[int, float] = {}  # by the number of the message
        self._length = self._until = 0
        self._heard = time.perf_counter()  # when the last step came, or the run was allowed to go on
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self._seconds(), self._look)
        self._tasks = [
            asyncio.create_task(self._write(), name="run stream"),
            asyncio.create_task(self._read(), name="run stream"),
        ]
        self._watching: asyncio.Task[None] | None = None
        if not session.client.is_only(self._endpoint):
            self._watching = asyncio.create_task(self._watch(), name="run stream")

    def send(self, message: RunMessage) -> None:
        if self._ended:
            return
        if self._length >= self._until:
            self._heard = time.perf_counter()
        self._length = max(self._length, message.draft.base_length)
        self._until = message.run_until
        self._next = run_message_to_wire(message, self._session.request(1, 0, ()))
        self._news.set()

    async def next(self) -> RunStep:
        """Returns the next step. Raises RoundsLost, or TandemError if the run cannot be resumed."""
        step = await self._steps.get()
        if isinstance(step, Exception):
            self._steps.put_nowait(step)
            raise step
        return step

    def _seconds(self) -> float:
        return self._session.retry_budget.limited(self._session.client.deadlines.verify)

    def _quiet(self) -> float:
        """Returns how many seconds the verifier has owed a step."""
        return time.perf_counter() - self._heard if self._length < self._until else 0.0

    def _look(self) -> None:
        """Gives up the run if a step is overdue."""
        left = self._seconds() - self._quiet()
        if left > 0 and not self._ended:
            self._deadline = asyncio.get_running_loop().call_later(left, self._look)
        else:
            text = f"the target made no step within {self._session.client.deadlines.verify:g} s"
            self._end(RoundsLost(TandemError("DEADLINE_EXCEEDED", text)))

    async def _write(self) -> None:
        """Writes messages. Errors of the stream are reported by `_read`."""
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            while True:
                await self._news.wait()
                self._news.clear()
                request, self._next = self._next, None
                if request is None:
                    return
                if not self._written:
                    request.stop_token_ids.extend(self._stops)
                self._written += 1
                self._sent_at[self._written] = time.perf_counter()
                if len(self._sent_at) > _SENT_KEPT:
                    self._sent_at.pop(next(iter(self._sent_at)))
                calls.sent(request, self._stats)
                await self._call.write(request)

    async def _read(self) -> None:
        try:
            async for reply in self._call:
                if self._ended is None:
                    self._take(reply)
            error: Exception = RoundsLost(TandemError("UNAVAILABLE", "the run of the session ended"))
        except grpc.RpcError as broken:
            error = self._as_error(from_rpc(self._status.error(broken)))
        except TandemError as refused:
            error = refused
        self._end(error)

    def _take(self, reply: pb.VerifyResponse) -> None:
        calls.received(reply, self._stats)
        self._heard = time.perf_counter()
        if reply.stale:
            return self._end(RoundsLost(OutOfStep(f"the verifier holds {reply.committed_length} tokens")))
        if reply.committed_length - len(reply.token_ids) != self._length:
            return self._end(RoundsLost(OutOfStep(f"a step is missing before {reply.committed_length} tokens")))
        self._session.check_reported(reply)
        self._session.take_features(reply)
        sent = self._sent_at.get(reply.messages_read)
        rtt = None if sent is None else max(0.0, self._heard - sent - reply.server_seconds)
        for number in [number for number in self._sent_at if number < reply.messages_read]:
            del self._sent_at[number]
        self._length = reply.committed_length
        self._steps.put_nowait(run_step_from_wire(reply, rtt))

    async def _watch(self) -> None:
        """Gives up the run if the verifier hangs."""
        waits = self._session.waits
        error = await watch("a step", self._endpoint.health, self._quiet, waits.silence, waits.round)
        self._end(RoundsLost(error))

    def _as_error(self, error: TandemError) -> Exception:
        if (error.code, error.message) == ENDED_MEANWHILE:  # the real status did not arrive in time
            return RoundsLost(TandemError("UNAVAILABLE", "the run of the session broke"))
        return RoundsLost(error) if error.code in LOST else error

    def _end(self, error: Exception) -> None:
        if self._ended is None:
            self._ended = error
            self._steps.put_nowait(error)

    async def close(self) -> None:
        """Cancels the call. The tasks that write and read first get time to end with it (see verify_stream)."""
        if self._watching:
            self._watching.cancel()
        self._deadline.cancel()
        self._call.cancel()
        self._next = None
        self._news.set()
        self._end(RoundsLost(TandemError("CANCELLED", "the run was closed")))
        await asyncio.wait(self._tasks, timeout=ENDS_SECONDS)
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
