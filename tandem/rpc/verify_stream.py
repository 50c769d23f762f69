"""Implements Verifier (rounds) and RunVerifier (a target that never waits) over VerifyStream."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from tandem.rpc import wire_checks as check
from tandem.rpc.client_duplex import ClientDuplex, RoundTrips
from tandem.rpc.received_errors import TandemError
from tandem.rpc.remote_session import RemoteSession
from tandem.rpc.wire_sessions import answer_from_wire, run_message_to_wire, run_step_from_wire, steps_from_wire
from tandem.speculation.errors import LOST
from tandem.speculation.never_waiting import OnStep
from tandem.speculation.rounds import OutOfStep, RoundsLost
from tandem.speculation.run_on import RunMessage
from tandem.speculation.types import Draft, InvalidField, SpeculationStats, Verdict
from tandem.v1 import target_verifier_pb2 as pb


class SessionStream(ClientDuplex[pb.VerifyRequest, pb.VerifyResponse]):
    def __init__(self, session: RemoteSession, stats: SpeculationStats) -> None:
        self._session, self.endpoint = session, session.endpoint
        call = session.endpoint.stub.VerifyStream(metadata=session.metadata)
        super().__init__(session.endpoint.name, call, stats, lambda: session.patience(self.endpoint))


def lost(error: Exception) -> Exception:
    """Returns RoundsLost if the session can be reopened, else the error."""
    return RoundsLost(error) if isinstance(error, TandemError) and error.outcome in LOST else error


Stream = TypeVar("Stream", bound=SessionStream)


class StreamedSession(Generic[Stream]):
    def __init__(self, session: RemoteSession, stats: SpeculationStats) -> None:
        self._session, self._stats = session, stats
        self._stream: Stream | None = None

    async def open(self, prompt: Sequence[int]) -> None:
        await self._session.open(prompt)

    async def resume(self, tokens: Sequence[int], cause: Exception) -> None:
        await self._leave()
        await self._session.resume(tokens, cause)

    async def close(self) -> None:
        try:
            await self._leave()
        finally:
            await self._session.close()

    async def _leave(self) -> None:
        stream, self._stream = self._stream, None
        if stream:
            await stream.close()


class RemoteVerifier(StreamedSession["RoundStream"]):
    def send(self, tokens: Sequence[int], draft: Draft) -> asyncio.Future[Verdict]:
        request = self._session.request(len(tokens), tokens[-1], draft.token_ids, draft.distributions)
        if self._stream is None:
            self._stream = RoundStream(self._session, self._stats)
        return self._stream.send(request)


@dataclass(slots=True)
class _Unanswered:
    request: pb.VerifyRequest
    verdict: asyncio.Future[Verdict]
    sent: float


class RoundStream(SessionStream):
    what = "the stream of rounds"

    def __init__(self, session: RemoteSession, stats: SpeculationStats) -> None:
        self._outgoing: deque[pb.VerifyRequest] = deque()
        self._unanswered: deque[_Unanswered] = deque()
        self._heard = 0.0  # when the last answer came
        super().__init__(session, stats)

    def send(self, request: pb.VerifyRequest) -> asyncio.Future[Verdict]:
        verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        verdict.add_done_callback(_looked_at)
        if self.ended:
            verdict.set_exception(lost(self.ended))
        else:
            self._unanswered.append(_Unanswered(request, verdict, time.perf_counter()))
            self._outgoing.append(request)
            self.news.set()
        return verdict

    def _next(self) -> pb.VerifyRequest | None:
        return self._outgoing.popleft() if self._outgoing else None

    def _owed(self) -> float:
        return time.perf_counter() - max(self._unanswered[0].sent, self._heard) if self._unanswered else 0.0

    def _take(self, reply: pb.VerifyResponse) -> None:
        # InvalidField loses this round and the later ones. A stale round is answered alone: later ones may not be.
        if not self._unanswered:
            raise InvalidField("reply", "answers no open round")
        asked, session, self._heard = self._unanswered[0], self._session, time.perf_counter()
        took = self._heard - asked.sent
        try:
            verdict: Verdict | RoundsLost = answer_from_wire(
                reply, asked.request, session.wanted, session.client.expected, took
            )
            session.take_features(reply)
            session.retry_budget.progress()
        except RoundsLost as stale:
            verdict = stale
        self._unanswered.popleft()
        if asked.verdict.done():
            return
        if isinstance(verdict, RoundsLost):
            asked.verdict.set_exception(verdict)
        else:
            asked.verdict.set_result(verdict)

    def _over(self, error: Exception) -> None:
        for asked in self._unanswered:
            if not asked.verdict.done():
                asked.verdict.set_exception(lost(error))
        self._unanswered.clear()


def _looked_at(verdict: asyncio.Future[Verdict]) -> None:
    # Otherwise asyncio logs an abandoned round's exception.
    if not verdict.cancelled():
        verdict.exception()


class RunningVerifier(StreamedSession["RunStream"]):
    """A session's run, which ends at a token of `stops`. `stats` counts bytes."""

    def __init__(self, session: RemoteSession, stats: SpeculationStats, stops: Collection[int] = ()) -> None:
        super().__init__(session, stats)
        self._stops, self._lost = sorted(stops), False

    @property
    def window(self) -> int:
        return self._session.max_unread

    async def open(self, prompt: Sequence[int]) -> None:
        """Opens the session and takes over its early run, or begins it again if refused."""
        await super().open(prompt)
        began = self._stream
        if began and (began.ended or began.endpoint is not self._session.endpoint):
            self._stats.wasted_steps += len(began.early) - (began.ended is not None)
            await self._leave()
            self.begin(prompt, self._on_step)
            self.send(self._newest)
        elif began:
            began.on_step = self._on_step
            for step in began.early:
                self._on_step(step)

    def begin(self, tokens: Sequence[int], on_step: OnStep) -> None:
        if not self._session.max_unread:
            where = self._session.endpoint.name
            raise TandemError("FAILED_PRECONDITION", f"max_unread_tokens: {where} does not run sessions")
        self._on_step, self._session.run_follows = on_step, True
        self._stream = RunStream(self._session, self._stats, self._stops, on_step)

    def send(self, message: RunMessage) -> None:
        self._newest = message
        if self._stream:  # else the run is being begun anew, and this is sent then
            self._stream.send(message)

    async def resume(self, tokens: Sequence[int], cause: Exception) -> None:
        self._lost = True
        await super().resume(tokens, cause)

    async def close(self) -> None:
        # Only if the target has run on, its answer is needed: it counts the unread steps.
        ran_on = self._lost or (self._stream is not None and self._stream.runs_on())
        try:
            await self._leave()
        finally:
            await self._session.close(wait=ran_on)


class RunStream(SessionStream):
    what = "the run of the session"

    def __init__(
        self, session: RemoteSession, stats: SpeculationStats, stops: Collection[int], on_step: OnStep
    ) -> None:
        self.early: list[Verdict | Exception] = []  # what comes before the verifier said what it applies
        self._stops, self.on_step = stops, on_step if session.opened_at else self.early.append
        self._newest: pb.VerifyRequest | None = None
        self._trips = RoundTrips()
        self._length = self._until = 0
        self._stopped = False
        self._began = time.perf_counter()
        self._heard = self._began  # when the last step came, or the run was allowed to go on
        super().__init__(session, stats)

    def runs_on(self) -> bool:
        return self._session.opened_at > 0 and not self._stopped and self._length < self._until

    def send(self, message: RunMessage) -> None:
        if self.ended:
            return
        if self._length >= self._until:
            self._heard = time.perf_counter()
        self._length = max(self._length, message.base_length)
        self._until = message.run_until
        self._newest = run_message_to_wire(message, self._session.request(1, 0, ()))
        self.news.set()

    def _next(self) -> pb.VerifyRequest | None:
        newest, self._newest = self._newest, None
        if newest:
            if not self._trips.sent:
                newest.stop_token_ids.extend(self._stops)
                newest.opening_sent, newest.takes_several = not self._session.opened_at, True
            self._trips.sending()
        return newest

    def _owed(self) -> float:
        owes = self._session.opened_at and self._length < self._until
        return time.perf_counter() - max(self._heard, self._session.opened_at) if owes else 0.0

    def _take(self, reply: pb.VerifyResponse) -> None:
        self._heard = time.perf_counter()
        for step in steps_from_wire(reply):
            self._take_step(step)

    def _take_step(self, reply: pb.VerifyResponse) -> None:
        if reply.stale:
            raise RoundsLost(OutOfStep(f"the verifier holds {reply.committed_length} tokens"))
        if reply.committed_length - len(reply.token_ids) != self._length:
            raise RoundsLost(OutOfStep(f"a step is missing before {reply.committed_length} tokens"))
        check.count("messages_read", reply.messages_read, self._trips.sent)
        if not reply.replayed:
            check.count("committed_length", reply.committed_length, self._until)
        own, session = check.seconds("server_seconds", reply.server_seconds), self._session
        rtt = self._trips.answered(reply.messages_read, own, again=True)
        took = self._heard - self._began
        step = run_step_from_wire(reply, self._length, session.wanted, session.client.expected, took, rtt)
        step.ended = self._heard
        session.take_features(reply)
        self._length = reply.committed_length
        self._stopped = not set(self._stops).isdisjoint(step.token_ids)
        session.retry_budget.progress()
        session.count_step()
        self.on_step(step)

    def _over(self, error: Exception) -> None:
        self.on_step(lost(error))
