"""Implements speculation's DraftsElsewhere over the RPC ProposeStream of a DraftWorker.

The target never waits for the worker: while there is no stream, or nothing comes, it decodes plainly. With an older
worker that has no ProposeStream, each draft is asked for by Propose.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import grpc

from tandem.rpc import calls, wire
from tandem.rpc.errors import TandemError, from_rpc
from tandem.rpc.remote_drafter import REFUSALS, DraftClient
from tandem.rpc.request_context import outgoing
from tandem.rpc.stream_status import ENDED_MEANWHILE, StreamStatus
from tandem.rpc.verify_stream import ENDS_SECONDS
from tandem.speculation.acceptance import known_prefix
from tandem.speculation.ahead import DraftingAhead
from tandem.speculation.draft_store import MAX_NODES
from tandem.speculation.fallible import Attempt, Backoff
from tandem.speculation.reach import Plan
from tandem.speculation.types import Draft, SamplingParams, SpeculationStats
from tandem.v1 import draft_worker_pb2 as pb

log = logging.getLogger("tandem.drafter")


class StreamedDrafts:
    """The drafts of one request of a target with `vocab_size` tokens. Counts bytes into `stats`.

    A worker that is silent for the client's `seconds` has failed. `deadline`: the request's, in monotonic seconds.
    """

    def __init__(
        self, client: DraftClient, vocab_size: int, stats: SpeculationStats, deadline: float | None = None
    ) -> None:
        self._client, self._vocab_size, self._stats, self._deadline = client, vocab_size, stats, deadline
        self._backoff = Backoff()  # after refusals of this request
        self._news = asyncio.Event()
        self._stream: _Stream | None = None

    def arrived(self) -> None:
        if self._stream:
            self._stream.news.set()
        elif not (self._client.health.up and self._backoff.up):
            self._client.health.skipped(self._stats)
        self._news.set()

    async def run(self, ahead: DraftingAhead, prompt_length: int, sampling: SamplingParams) -> None:
        while self._client.streams is not False:
            attempt = self._attempt()
            if attempt:
                await self._follow(attempt, ahead, prompt_length, sampling)
            else:
                await self._news.wait()
                self._news.clear()

    def _attempt(self) -> Attempt | None:
        attempt = self._client.health.attempt()
        if attempt is None or not (self._backoff.up or self._backoff.due()):
            return None
        return Attempt(self._client.health, trial=attempt.trial or not self._backoff.up)

    async def _follow(
        self, attempt: Attempt, ahead: DraftingAhead, prompt_length: int, sampling: SamplingParams
    ) -> None:
        """Adopts the drafts of one stream, and reports how it ended."""
        try:
            limits = await self._client.info(self._client.seconds)
            if len(ahead.known) >= limits.max_sequence_length:
                await asyncio.Event().wait()  # too long for the worker: it drafts no more
            first = pb.ProposeStreamRequest(
                session_id=uuid.uuid4().hex,
                sampling=wire.sampling_to_wire(sampling),
                tokenizer_sha256=self._client.tokenizer_sha256,
                prompt_length=prompt_length,
                max_total_tokens=ahead.end,
            )
            self._stream = _Stream(self._client, first, ahead, limits.max_sequence_length, self._stats, self._deadline)
            async for reply in self._stream.replies():
                self._client.streams = True
                self._backoff.succeeded()
                attempt.succeeded()
                self._take(reply, self._stream, ahead)
        except TandemError as error:
            self._failed(attempt, error)
        except Exception as error:  # no error of a drafter may end a request
            attempt.failed(error)
        finally:
            stream, self._stream = self._stream, None
            if stream:
                await stream.close()

    def _failed(self, attempt: Attempt, error: TandemError) -> None:
        if error.code == "UNIMPLEMENTED":
            log.warning("%s has no ProposeStream: asking for each draft", self._client.address)
            self._client.streams = False
        elif error.code in REFUSALS or self._is_over():
            attempt.succeeded()  # a refusal is an answer
            if self._backoff.failed(attempt.trial):
                log.debug("drafter %s refused a request: %s", self._client.address, error.code)
        else:
            self._client.forget()
            attempt.failed(error)

    def _is_over(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _take(self, reply: pb.ProposeStreamResponse, stream: _Stream, ahead: DraftingAhead) -> None:
        """Records what a reply says that was spent, and adopts its draft."""
        if not 1 <= reply.base_length <= stream.told:
            raise TandemError("INTERNAL", f"the worker drafts after {reply.base_length} of {stream.told} tokens")
        times = ahead.reach.measured.times
        times.drafted(reply.drafted, reply.compute_seconds)
        if (rtt := stream.round_trip(reply)) is not None:
            times.travelled(rtt)
        self._stats.spent(Draft((), reply.queue_seconds, reply.compute_seconds))
        ahead.drafted += reply.drafted
        tokens = known_prefix(reply.draft_tokens[:MAX_NODES], self._vocab_size)
        ahead.adopt(reply.base_length, tokens, wire.proposers_from_wire(reply.proposed_by, len(tokens)))


class _Stream:
    """One ProposeStream call, which tells the worker what is known of a sequence of at most `longest` tokens.

    `news` is set when more is known. `told`: the tokens that the worker was told.
    """

    def __init__(
        self,
        client: DraftClient,
        first: pb.ProposeStreamRequest,
        ahead: DraftingAhead,
        longest: int,
        stats: SpeculationStats,
        deadline: float | None,
    ) -> None:
        self._seconds, self._stats, self._ahead, self._longest = client.seconds, stats, ahead, longest
        self.told, self.news = 0, asyncio.Event()
        timeout = None if deadline is None else max(0.001, deadline - time.monotonic())
        self._call: Any = client.stub.ProposeStream(timeout=timeout, metadata=outgoing())
        self._status = StreamStatus(self._call)
        self._sent_at: dict[int, float] = {}  # when messages were sent that are not answered yet, by number
        self._written = 0
        self._replies: asyncio.Queue[pb.ProposeStreamResponse | TandemError | None] = asyncio.Queue()
        self._late = asyncio.get_running_loop().call_later(self._seconds, self._look)
        self._tasks = [
            asyncio.create_task(self._write(first), name="propose stream"),
            asyncio.create_task(self._read(), name="propose stream"),
        ]

    async def replies(self) -> AsyncIterator[pb.ProposeStreamResponse]:
        """Yields replies until the sequence is too long for the worker. Raises TandemError if the stream ends."""
        while (reply := await self._replies.get()) is not None:
            if isinstance(reply, TandemError):
                raise reply
            yield reply

    def round_trip(self, reply: pb.ProposeStreamResponse) -> float | None:
        """Returns the seconds that the network took for the message that a reply answers, if it is the first to."""
        sent = self._sent_at.get(reply.messages_read)
        for number in [number for number in self._sent_at if number <= reply.messages_read]:
            del self._sent_at[number]
        return None if sent is None else max(0.0, time.perf_counter() - sent - reply.server_seconds)

    def _next(self, request: pb.ProposeStreamRequest) -> pb.ProposeStreamRequest:
        """Adds to `request` what the worker was not told, and how far it is to draft."""
        known, plan = self._ahead.known, self._ahead.reach.plan
        request.tokens.extend(known[self.told :])
        request.draft_ahead, request.send_first, request.send_more = _within(plan)
        self.told = len(known)
        return request

    async def _write(self, request: pb.ProposeStreamRequest) -> None:
        """Writes messages, the first from `request`. Errors of the stream are reported by `_read`."""
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            while True:
                if len(self._ahead.known) >= self._longest:
                    return self._replies.put_nowait(None)
                if len(self._ahead.known) > self.told:
                    self._written += 1
                    self._sent_at[self._written] = time.perf_counter()
                    await self._call.write(calls.sent(self._next(request), self._stats))
                    request = pb.ProposeStreamRequest()
                await self.news.wait()
                self.news.clear()

    async def _read(self) -> None:
        try:
            async for reply in self._call:
                self._replies.put_nowait(calls.received(reply, self._stats))
            error = TandemError("UNAVAILABLE", "the stream of proposals ended")
        except grpc.RpcError as broken:
            error = from_rpc(self._status.error(broken))
            if (error.code, error.message) == ENDED_MEANWHILE:  # the real status did not arrive in time
                error = TandemError("UNAVAILABLE", "the stream of proposals broke")
        self._replies.put_nowait(error)

    def _look(self) -> None:
        """Gives up the stream if an answer is overdue."""
        oldest = min(self._sent_at.values(), default=time.perf_counter())
        left = self._seconds - (time.perf_counter() - oldest)
        if left > 0:
            self._late = asyncio.get_running_loop().call_later(left, self._look)
        else:
            text = f"the worker did not answer within {self._seconds:g} s"
            self._replies.put_nowait(TandemError("DEADLINE_EXCEEDED", text))

    async def close(self) -> None:
        """Cancels the call. The tasks that write and read first get time to end with it (see verify_stream)."""
        self._late.cancel()
        self._call.cancel()
        await asyncio.wait(self._tasks, timeout=ENDS_SECONDS)
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)


def _within(plan: Plan) -> tuple[int, int, int]:
    """Returns how far to draft, within what the contract allows."""
    return min(plan.depth, MAX_NODES), plan.fresh, plan.width
