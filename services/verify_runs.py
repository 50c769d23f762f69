"""Runs that step without waiting for their client, over VerifyStream."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager

from tandem.engine.generator import check_tokens
from tandem.engine.sequences import RunStepper
from tandem.rpc.wire_sessions import STEPS_TOGETHER, run_message_from_wire, verdict_to_wire
from tandem.services.security.callers import caller
from tandem.services.server_duplex import Duplex, Incoming
from tandem.services.sessions.table import Fence, Session, SessionExpired, SessionNotFound, SessionTable, session_key
from tandem.speculation.estimate import Estimate
from tandem.speculation.lookup_policy import PolicedLookup
from tandem.speculation.run_on import RunMessage, SelfPacedRun
from tandem.speculation.types import InvalidField, ModelInfo, Rule, TooLong, Verdict
from tandem.v1 import target_verifier_pb2 as pb

MAX_STOP_TOKENS = 256  # in a run's first message
OPENING_COMES = 5.0  # seconds to wait for the OpenSession sent with the run


class Superseded(Exception):
    """Other calls have committed or reset the session's tokens: the run is over."""


class Run(Duplex[pb.VerifyRequest, pb.VerifyResponse]):
    """A session's run on one stream. `together`: most steps in a reply. `run` bounds waiting replies."""

    def __init__(self, runs: VerifyRuns, session: Session, run: SelfPacedRun, together: int) -> None:
        super().__init__()
        self._runs, self._session, self.run, self._together = runs, session, run, together
        self.received = 0.0
        self._waiting: deque[pb.VerifyResponse] = deque()

    def receive(self, message: RunMessage, arrived: float) -> None:
        """Handles a checked message read at `arrived` (perf_counter)."""
        self.run.receive(message)
        self.received = arrived

    def on_request(self, request: pb.VerifyRequest, arrived: float) -> None:
        self.receive(self._runs.message(self._session, request), arrived)

    async def work(self, incoming: Incoming[pb.VerifyRequest]) -> None:
        with contextlib.suppress(Superseded):
            while not self.ended:
                self.run.news.clear()
                if reply := await self._runs.step(self._session, self):
                    self._waiting.append(reply)
                    self.ready()
                else:
                    incoming.busy(False)
                    await self.run.news.wait()
                    incoming.busy(True)

    def next_reply(self) -> pb.VerifyResponse | None:
        # A message costs more than another step in it: send all that wait.
        reply = self._waiting.popleft() if self._waiting else None
        while reply and self._waiting and len(reply.next_steps) < self._together - 1:
            reply.next_steps.append(self._waiting.popleft())
        return reply


def commit(session: Session, draft: Sequence[int], verdict: Verdict) -> pb.VerifyResponse:
    """Commits a verdict on `draft`; returns the recorded reply."""
    reply = verdict_to_wire(verdict, len(session.tokens) + len(verdict.token_ids))
    session.commit(verdict.token_ids, reply)
    verdict.with_prompt = False  # the client counts it as a round
    session.stats.observe(draft, verdict)
    return reply


def recorded(session: Session) -> pb.VerifyResponse:
    reply = pb.VerifyResponse()
    reply.CopyFrom(session.recorded)
    reply.replayed = True
    return reply


class VerifyRuns:
    def __init__(
        self, sessions: SessionTable, info: ModelInfo, using: Callable[[Session], AbstractAsyncContextManager[None]]
    ) -> None:
        self._sessions, self._info, self._using = sessions, info, using
        self._estimate = Estimate()
        sessions.on_end.append(_session_ended)

    async def replies(
        self, request: pb.VerifyRequest, arrived: float, incoming: Incoming[pb.VerifyRequest]
    ) -> AsyncGenerator[pb.VerifyResponse, None]:
        """Yields a reply per step of the run that `request` begins; `incoming`: later messages."""
        key = session_key(caller(), request.session_id)
        if request.opening_sent:
            await self._sessions.arrival(key, OPENING_COMES)
        session = self._sessions.touch(key)
        message = self._check_first(session, request)
        run, reply = await self._begun(session, request, message, arrived)
        if reply is not None:
            yield reply
        if run is None:
            return
        try:
            async for reply in run.replies(incoming):
                yield reply
        finally:
            if session.run is run:
                session.end_run()

    async def _begun(
        self, session: Session, request: pb.VerifyRequest, message: RunMessage, arrived: float
    ) -> tuple[Run | None, pb.VerifyResponse | None]:
        """Returns the run, unless the first message is stale, and the reply before its first step."""
        async with self._using(session):
            fence = session.fence(request.base_length, request.last_token)
            if fence is Fence.STALE:
                return None, pb.VerifyResponse(stale=True, committed_length=len(session.tokens), messages_read=1)
            replay = None
            if fence is Fence.REPLAY:
                replay = recorded(session)
                replay.messages_read, replay.server_seconds = 1, time.perf_counter() - arrived
            session.end_run()
            sequence = session.sequence
            lookup = PolicedLookup(self._estimate, only_grows=True)
            await lookup.open(session.tokens)
            paced = SelfPacedRun(session.tokens, request.stop_token_ids, lookup=lookup)
            together = STEPS_TOGETHER if request.takes_several and session.request.features is None else 1
            run = session.run = Run(self, session, paced, together)
            run.receive(message, arrived)
            paced.note_stops(replay.token_ids if replay else ())
            if paced.room < 1:
                sequence.begun = None  # it may not be committed yet
            sequence.set_stepper(RunStepper(sequence, paced))
            return run, replay

    async def step(self, session: Session, run: Run) -> pb.VerifyResponse | None:
        """Commits the next step; None while paused. Raises Superseded."""
        async with self._using(session):
            if session.run is not run:
                raise Superseded
            session.steps += 1
            if (found := await session.sequence.next_verdict()) is None:
                session.steps -= 1
                return None
            row, verdict = found
            reply = commit(session, row.draft, verdict)
            reply.drafted, reply.copied, reply.messages_read = len(row.draft), row.copied, run.run.messages
            reply.server_seconds = time.perf_counter() - run.received
            run.run.stepped(len(row.draft), verdict.compute_seconds, verdict.rows)
            return reply

    def _check_first(self, session: Session, request: pb.VerifyRequest) -> RunMessage:
        # Checked before an earlier run of the session is ended.
        rule = session.request.rule
        if rule is not Rule.AGREEMENT:
            raise InvalidField("run_until", f"a session that verifies by {rule.value} does not run")
        if len(request.stop_token_ids) > MAX_STOP_TOKENS:
            raise InvalidField("stop_token_ids", f"{len(request.stop_token_ids)} are above {MAX_STOP_TOKENS}")
        check_tokens("stop_token_ids", list(request.stop_token_ids), self._info.vocab_size)
        return self.message(session, request)

    def message(self, session: Session, request: pb.VerifyRequest) -> RunMessage:
        # Renews the session's lease.
        if request.session_id != session.session_id.session_id:
            raise InvalidField("session_id", "a run has one session")
        if not request.HasField("run_until"):
            raise InvalidField("run_until", "absent: the stream is a run since an earlier message")
        if request.distributions:
            raise InvalidField("distributions", f"{len(request.distributions)}, but a run takes none")
        self._sessions.touch(session.session_id, session)
        message = run_message_from_wire(request, self._info.max_speculation_length)
        check_tokens("last_token", [request.last_token], self._info.vocab_size)
        check_tokens("draft_tokens", message.token_ids, self._info.vocab_size)
        if request.run_until > session.max_total_tokens:
            raise TooLong(f"run_until {request.run_until} is above the sequence length {session.max_total_tokens}")
        return message


def _session_ended(session: Session, how: str) -> None:
    error = SessionExpired if how == "expired" else SessionNotFound
    session.end_run(error(f"no session {session.session_id}: it was {how} during its run"))
