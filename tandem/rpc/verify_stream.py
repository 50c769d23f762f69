"""Implements Verifier over VerifyStream; a lost stream loses only its unanswered rounds."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from tandem.rpc.duplex import Duplex
from tandem.rpc.errors import TandemError
from tandem.rpc.remote_session import RemoteSession
from tandem.rpc.wire_sessions import answer_from_wire
from tandem.speculation.errors import LOST
from tandem.speculation.rounds import Answer, RoundsLost
from tandem.speculation.types import Draft, InvalidField, SpeculationStats
from tandem.v1 import target_verifier_pb2 as pb


class SessionStream(Duplex[pb.VerifyRequest, pb.VerifyResponse]):
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
    def send(self, tokens: Sequence[int], draft: Draft) -> asyncio.Future[Answer]:
        request = self._session.request(len(tokens), tokens[-1], draft.token_ids, draft.distributions)
        if self._stream is None:
            self._stream = RoundStream(self._session, self._stats)
        return self._stream.send(request)


@dataclass(slots=True)
class _Unanswered:
    request: pb.VerifyRequest
    answer: asyncio.Future[Answer]
    sent: float


class RoundStream(SessionStream):
    what = "the stream of rounds"

    def __init__(self, session: RemoteSession, stats: SpeculationStats) -> None:
        self._outgoing: deque[pb.VerifyRequest] = deque()
        self._unanswered: deque[_Unanswered] = deque()
        self._heard = 0.0  # when the last answer came
        super().__init__(session, stats)

    def send(self, request: pb.VerifyRequest) -> asyncio.Future[Answer]:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(_looked_at)
        if self.ended:
            answer.set_exception(lost(self.ended))
        else:
            self._unanswered.append(_Unanswered(request, answer, time.perf_counter()))
            self._outgoing.append(request)
            self.news.set()
        return answer

    def _next(self) -> pb.VerifyRequest | None:
        return self._outgoing.popleft() if self._outgoing else None

    def _owed(self) -> float:
        return time.perf_counter() - max(self._unanswered[0].sent, self._heard) if self._unanswered else 0.0

    def _take(self, reply: pb.VerifyResponse) -> None:
        # InvalidField loses this round and the later ones.
        if not self._unanswered:
            raise InvalidField("reply", "answers no open round")
        asked, self._heard = self._unanswered[0], time.perf_counter()
        answer = answer_from_wire(reply, asked.request, self._session.bounds, self._heard - asked.sent)
        self._session.take_features(reply)
        if answer.verdict is not None:
            self._session.retry_budget.progress()
        self._unanswered.popleft()
        if not asked.answer.done():
            asked.answer.set_result(answer)

    def _over(self, error: Exception) -> None:
        for asked in self._unanswered:
            if not asked.answer.done():
                asked.answer.set_exception(lost(error))
        self._unanswered.clear()


def _looked_at(answer: asyncio.Future[Answer]) -> None:
    # Otherwise asyncio logs an abandoned round's exception.
    if not answer.cancelled():
        answer.exception()
