"""Proposal sessions of a DraftWorker, for callers that verify the drafts themselves."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass

from tandem.engine.drafting import Drafting
from tandem.engine.generator import check_tokens
from tandem.rpc import wire
from tandem.services.duplex import Incoming
from tandem.services.errors import VocabularyMismatch
from tandem.services.lifecycle import Lifecycle
from tandem.services.security.identity import caller
from tandem.services.security.limits import ServerLimits
from tandem.services.security.names import check_name
from tandem.services.sessions.checkout import Checkout
from tandem.services.sessions.proposal_limits import ProposalCounts
from tandem.services.sessions.proposal_stream import ProposalStream
from tandem.services.sessions.table import Session, SessionConflict, SessionKey, SessionTable, session_key
from tandem.speculation.drafters import Drafter
from tandem.speculation.types import MAX_DRAFTED, InvalidField, ModelInfo, Request, TooLong
from tandem.v1 import draft_worker_pb2 as pb

SLOT_SECONDS = 0.2
"""How long a session's first call waits for a slot of the draft model. Its caller has no draft in the meantime."""


@dataclass(slots=True)
class ProposalResources:
    """A session's drafter (`ready` once opened). `counted`: the tokens counted against the limits."""

    drafter: Drafter
    counted: int = 0
    ready: bool = False


class Proposals:
    """Answers Propose, ProposeStream and EndProposals. A session keeps all its tokens, and its drafter follows them."""

    def __init__(
        self,
        drafting: Drafting,
        info: ModelInfo,
        lifecycle: Lifecycle,
        lease_seconds: float = 60.0,
        limits: ServerLimits | None = None,
    ) -> None:
        self._drafting, self._info, self._lifecycle = drafting, info, lifecycle
        self._limits = limits or ServerLimits()
        self._proposed = ProposalCounts(self._limits)
        self._vocab_size = min(info.vocab_size, drafting.vocab_size)
        self.sessions: SessionTable[ProposalResources, None] = SessionTable(time.monotonic, lease_seconds)
        self.checkout = Checkout(self.sessions, self._free)

    async def propose(self, request: pb.ProposeRequest) -> pb.ProposeResponse:
        """Drafts tokens. A failed first call leaves no session. Raises errors that services/errors.py maps."""
        arrived = time.perf_counter()
        key = session_key(caller(), request.session_id)
        self._check(request)
        session = self.sessions.find(key)
        if session is None:
            if request.known_length:
                return pb.ProposeResponse(unknown=True)
            await self.checkout.expire()
            session = self.sessions.find(key) or self._admit(key, wire.proposing_from_wire(request))
        async with self.checkout.using(session):
            reply = await self._round(session, request)
        reply.server_seconds = time.perf_counter() - arrived
        return reply

    async def end(self, request: pb.EndProposalsRequest) -> pb.EndProposalsResponse:
        key = session_key(caller(), request.session_id)
        return pb.EndProposalsResponse(ended=await self.checkout.drop(key))

    async def stream(
        self, requests: AsyncIterator[pb.ProposeStreamRequest]
    ) -> AsyncGenerator[pb.ProposeStreamResponse, None]:
        """Drafts for a caller that never waits. The session ends with the stream."""
        with contextlib.closing(Incoming(requests, self.sessions.lease_seconds)) as incoming:
            if (first := await incoming.next()) is not None:
                async with contextlib.aclosing(self._followed(*first, incoming)) as replies:
                    async for reply in replies:
                        yield reply

    async def _followed(
        self, request: pb.ProposeStreamRequest, arrived: float, incoming: Incoming[pb.ProposeStreamRequest]
    ) -> AsyncGenerator[pb.ProposeStreamResponse, None]:
        key = session_key(caller(), request.session_id)
        self._check_tokenizer(request.tokenizer_sha256)
        self._check_message(request, 0)
        if not request.tokens:
            raise InvalidField("tokens", "empty: at least one token is needed")
        await self.checkout.expire()
        session = self._admit(key, wire.proposing_from_wire(request))

        def check(message: pb.ProposeStreamRequest) -> None:
            if message.session_id not in ("", request.session_id):
                raise InvalidField("session_id", "a stream has one session")
            self.sessions.touch(key, session)
            self._check_message(message, len(session.tokens))
            self._keep(session, [*session.tokens, *message.tokens])

        async with self.checkout.using(session):
            try:
                self._keep(session, list(request.tokens))
                await self._ready(session, request.prompt_length)
                end = min(request.max_total_tokens or session.max_total_tokens, session.max_total_tokens)
                chunk = max(1, self._info.max_speculation_length)
                stream = ProposalStream(session.resources.drafter, request, arrived, end, chunk, check)
                async with contextlib.aclosing(stream.replies(incoming)) as replies:
                    async for reply in replies:
                        yield reply
            finally:
                self.sessions.drop(key)

    def _admit(self, key: SessionKey, asked: Request) -> Session[ProposalResources, None]:
        self._lifecycle.check()
        self.sessions.check_new(key)
        self._limits.check_sessions(self.sessions.owned_by(key.owner))
        resources = ProposalResources(self._drafting.drafter(asked, self._info.vocab_size, SLOT_SECONDS))
        self._proposed.open(key.owner)
        return self.sessions.admit(key, resources, asked, [], self._info.max_sequence_length)

    async def _round(self, session: Session[ProposalResources, None], request: pb.ProposeRequest) -> pb.ProposeResponse:
        if request.known_length > len(session.tokens):
            return pb.ProposeResponse(unknown=True)
        if request.HasField("sampling") and wire.sampling_from_wire(request.sampling) != session.request.sampling:
            raise SessionConflict(f"session {session.session_id} proposes with other sampling parameters")
        tokens = [*session.tokens[: request.known_length], *request.tokens]
        if not tokens:
            raise InvalidField("tokens", "empty: at least one token is needed")
        self._keep(session, tokens)
        drafter = await self._ready(session, request.prompt_length)
        model_k = request.model_speculation_length if request.HasField("model_speculation_length") else None
        return wire.draft_to_wire(await drafter.propose(tokens, request.speculation_length, model_k))

    def _keep(self, session: Session[ProposalResources, None], tokens: list[int]) -> None:
        """Makes `tokens` those of the session. Raises LimitReached."""
        self._proposed.grow(session.session_id.owner, len(tokens) - session.resources.counted)
        session.tokens, session.resources.counted = tokens, len(tokens)

    async def _ready(self, session: Session[ProposalResources, None], prompt_length: int) -> Drafter:
        """Returns the session's drafter, opened."""
        resources, tokens = session.resources, session.tokens
        if not resources.ready:
            await resources.drafter.close()  # frees what a cancelled opening may have left
            await resources.drafter.open(tokens[: prompt_length or len(tokens)])
            resources.ready = True
        return resources.drafter

    def _check(self, request: pb.ProposeRequest) -> None:
        most = self._info.max_speculation_length
        if request.speculation_length > most:
            raise InvalidField("speculation_length", f"{request.speculation_length} is above the maximum {most}")
        self._check_tokenizer(request.tokenizer_sha256)
        self._check_tokens(request.known_length, request.tokens)

    def _check_message(self, request: pb.ProposeStreamRequest, known: int) -> None:
        """Checks a message of a stream whose session has `known` tokens."""
        if request.draft_ahead > MAX_DRAFTED:
            raise InvalidField("draft_ahead", f"{request.draft_ahead} is above {MAX_DRAFTED}")
        self._check_tokens(known, request.tokens)

    def _check_tokens(self, known: int, tokens: Sequence[int]) -> None:
        if known + len(tokens) > self._info.max_sequence_length:
            raise TooLong(
                f"known_length {known} and {len(tokens)} tokens: "
                f"together above the sequence length {self._info.max_sequence_length}"
            )
        check_tokens("tokens", list(tokens), self._vocab_size)

    def _check_tokenizer(self, sha256: str) -> None:
        check_name("tokenizer_sha256", sha256)
        if sha256 and sha256 != self._info.tokenizer_sha256:
            raise VocabularyMismatch(
                f"the caller's tokenizer {sha256[:12]} is not the draft's "
                f"{self._info.tokenizer_sha256[:12]}: draft and target must share a vocabulary"
            )

    async def _free(self, session: Session[ProposalResources, None]) -> None:
        self._proposed.close(session.session_id.owner, session.resources.counted)
        session.resources.counted = 0
        await session.resources.drafter.close()
