"""A DraftWorker's proposal sessions, one per Propose stream."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field

from tandem.engine.generator import check_tokens
from tandem.engine.generators import Drafting
from tandem.rpc.wire_sessions import draft_to_wire, proposing_from_wire
from tandem.services.duplex import Incoming
from tandem.services.errors import VocabularyMismatch
from tandem.services.lifecycle import Lifecycle
from tandem.services.security.identity import caller
from tandem.services.security.limits import ServerLimits
from tandem.services.security.names import check_name
from tandem.services.sessions.proposal_limits import ProposalSessions
from tandem.services.sessions.proposal_stream import ProposalStream
from tandem.speculation.drafters import Drafter
from tandem.speculation.types import MAX_DRAFTED, InvalidField, ModelInfo, Rule, TooLong
from tandem.v1 import draft_worker_pb2 as pb

SLOT_SECONDS = 0.2  # seconds to wait for a draft slot, without a draft in the meantime

Replies = AsyncGenerator[pb.ProposeResponse, None]


@dataclass(slots=True, eq=False)
class ProposalSession:
    owner: str
    drafter: Drafter
    tokens: list[int] = field(default_factory=list)


class Proposals:
    def __init__(
        self,
        drafting: Drafting,
        info: ModelInfo,
        lifecycle: Lifecycle,
        lease_seconds: float = 60.0,
        limits: ServerLimits | None = None,
    ) -> None:
        self._drafting, self._info, self._lifecycle = drafting, info, lifecycle
        self._lease_seconds, self._limits = lease_seconds, limits or ServerLimits()
        self._vocab_size = min(info.vocab_size, drafting.vocab_size)
        self.sessions = ProposalSessions(self._limits)

    async def stream(self, requests: AsyncIterator[pb.ProposeRequest]) -> Replies:
        with contextlib.closing(Incoming(requests, self._lease_seconds)) as incoming:
            if (first := await incoming.next()) is None:
                return
            request, arrived = first
            incoming.busy(True)
            async with self._session(request) as session:
                answer = self._answers if request.HasField("speculation_length") else self._follows
                async with contextlib.aclosing(answer(session, request, arrived, incoming)) as replies:
                    async for reply in replies:
                        yield reply

    @contextlib.asynccontextmanager
    async def _session(self, first: pb.ProposeRequest) -> AsyncGenerator[ProposalSession, None]:
        self._check_tokenizer(first.tokenizer_sha256)
        self._check(first, 0)
        if not first.tokens:
            raise InvalidField("tokens", "empty: at least one token is needed")
        asked, owner = proposing_from_wire(first), caller()
        if asked.rule is not Rule.AGREEMENT and not first.HasField("speculation_length"):
            raise InvalidField(
                "rule", "agreement alone, without speculation_length: nobody knows which draft is verified"
            )
        self._lifecycle.check()
        self._limits.check_sessions(self.sessions.owned_by(owner))
        session = ProposalSession(owner, self._drafting.drafter(asked, self._info.vocab_size, SLOT_SECONDS))
        with self.sessions.one(owner):
            try:
                self._keep(session, first)
                await session.drafter.open(session.tokens[: first.prompt_length or len(session.tokens)])
                yield session
            finally:
                self.sessions.grow(owner, -len(session.tokens))
                await session.drafter.close()

    async def _answers(
        self,
        session: ProposalSession,
        request: pb.ProposeRequest,
        arrived: float,
        incoming: Incoming[pb.ProposeRequest],
    ) -> Replies:
        while True:
            model_k = request.model_speculation_length if request.HasField("model_speculation_length") else None
            draft = await session.drafter.propose(session.tokens, request.speculation_length, model_k)
            reply = draft_to_wire(draft)
            reply.base_length, reply.server_seconds = len(session.tokens), time.perf_counter() - arrived
            yield reply
            incoming.busy(False)
            if (item := await incoming.next()) is None:
                return
            incoming.busy(True)
            request, arrived = item
            self._extend(session, request)

    async def _follows(
        self,
        session: ProposalSession,
        request: pb.ProposeRequest,
        arrived: float,
        incoming: Incoming[pb.ProposeRequest],
    ) -> Replies:
        incoming.busy(False)
        most = self._info.max_sequence_length
        stream = ProposalStream(
            session.drafter,
            request,
            arrived,
            min(request.max_total_tokens or most, most),
            max(1, self._info.max_speculation_length),
            lambda message: self._extend(session, message),
        )
        async with contextlib.aclosing(stream.replies(incoming)) as replies:
            async for reply in replies:
                yield reply

    def _extend(self, session: ProposalSession, request: pb.ProposeRequest) -> None:
        self._check(request, len(session.tokens))
        self._keep(session, request)

    def _keep(self, session: ProposalSession, request: pb.ProposeRequest) -> None:
        self.sessions.grow(session.owner, len(request.tokens))
        session.tokens = [*session.tokens, *request.tokens]

    def _check(self, request: pb.ProposeRequest, known: int) -> None:
        for name, most in (("speculation_length", self._info.max_speculation_length), ("draft_ahead", MAX_DRAFTED)):
            if (given := getattr(request, name)) > most:
                raise InvalidField(name, f"{given} is above the maximum {most}")
        if known + len(request.tokens) > self._info.max_sequence_length:
            raise TooLong(
                f"{known} known tokens and {len(request.tokens)} more: "
                f"together above the sequence length {self._info.max_sequence_length}"
            )
        check_tokens("tokens", list(request.tokens), self._vocab_size)

    def _check_tokenizer(self, sha256: str) -> None:
        check_name("tokenizer_sha256", sha256)
        if sha256 and sha256 != self._info.tokenizer_sha256:
            raise VocabularyMismatch(
                f"the caller's tokenizer {sha256[:12]} is not the draft's "
                f"{self._info.tokenizer_sha256[:12]}: draft and target must share a vocabulary"
            )
