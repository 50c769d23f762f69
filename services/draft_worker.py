"""DraftWorker service: generates with a remote TargetVerifier and proposes drafts to targets, a session per stream."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator

from tandem.engine.generator import check_tokens
from tandem.engine.generators import Drafting
from tandem.rpc.channel import DRAFT
from tandem.rpc.wire_sessions import draft_to_wire, proposing_from_wire
from tandem.services.calls import Context
from tandem.services.generation import GenerateMethod, GeneratingService
from tandem.services.security.callers import ANONYMOUS, caller
from tandem.services.security.limits import LimitReached, ServerLimits
from tandem.services.server_duplex import Duplex, Incoming, StreamIdle, answered_in_order
from tandem.services.shutdown import Lifecycle
from tandem.speculation.ahead import Follower
from tandem.speculation.drafters import Drafter
from tandem.speculation.types import MAX_DRAFTED, InvalidField, LengthPlan, ModelInfo, Rule, TooLong
from tandem.speculation.verification_mode import DraftPlan
from tandem.v1 import draft_worker_pb2 as pb
from tandem.v1.draft_worker_pb2_grpc import DraftWorkerServicer

BYTES_PER_TOKEN = 1024  # of a session: the lookup index, measured
SLOT_SECONDS = 0.2  # seconds to wait for a draft slot, without a draft in the meantime

Replies = AsyncGenerator[pb.ProposeResponse, None]


class ProposalSessions:
    """Counts open sessions, whose number calls' limits bound, and limits their bytes; totals are metrics."""

    opened = closed = expired = 0

    def __init__(self, most_bytes: int) -> None:
        self._most, self._sessions, self._bytes = most_bytes, Counter[str](), Counter[str]()

    def __len__(self) -> int:
        return self._sessions.total()

    def owned_by(self, identity: str) -> int:
        return self._sessions[identity]

    @contextlib.contextmanager
    def one(self, identity: str) -> Iterator[None]:
        """Counts a session while the block runs."""
        self._sessions[identity] += 1
        self.opened += 1
        try:
            yield
            self.closed += 1
        except BaseException as error:
            idle = isinstance(error, StreamIdle)
            self.expired, self.closed = self.expired + idle, self.closed + (not idle)
            raise
        finally:
            self._sessions -= Counter([identity])

    def grow(self, identity: str, tokens: int) -> None:
        """Adds `tokens` (may be negative) to a session. Raises LimitReached: one named caller has half of the limit."""
        more = tokens * BYTES_PER_TOKEN
        own = self._most if identity == ANONYMOUS else self._most // 2
        for who, now, limit in (("your", self._bytes[identity], own), ("all", self._bytes.total(), self._most)):
            if more > 0 and now + more > limit:
                room = f"there is no room for {more} more"
                raise LimitReached(f"max_proposal_bytes: {who} proposal sessions use {now} of {limit}: {room}")
        self._bytes[identity] += more
        if not self._bytes[identity]:
            del self._bytes[identity]


class ProposalSession(Duplex[pb.ProposeRequest, pb.ProposeResponse]):
    """A stream's tokens, which messages extend: answered one by one, or followed from `first` on."""

    def __init__(self, service: DraftWorkerService, drafter: Drafter) -> None:
        super().__init__()
        self.drafter, self.tokens, self.owner = drafter, list[int](), caller()
        self._service, self._messages = service, 0
        self._read_at: dict[int, float] = {}  # when messages were read, by number
        self._follower: Follower

    def extend(self, request: pb.ProposeRequest) -> None:
        self._service.check(request, len(self.tokens))
        self._service.sessions.grow(self.owner, len(request.tokens))
        self.tokens = [*self.tokens, *request.tokens]

    async def answer(self, request: pb.ProposeRequest, arrived: float) -> pb.ProposeResponse:
        k = request.speculation_length
        most = request.model_speculation_length if request.HasField("model_speculation_length") else k
        plan = LengthPlan(k, min(most, k), least=request.least_probability)
        reply = draft_to_wire(await self.drafter.propose(self.tokens, plan))
        reply.base_length, reply.server_seconds = len(self.tokens), time.perf_counter() - arrived
        return reply

    def follow(self, first: pb.ProposeRequest, arrived: float, incoming: Incoming[pb.ProposeRequest]) -> Replies:
        info = self._service.info
        most, chunk = info.max_sequence_length, max(1, info.max_speculation_length)
        end = min(first.max_total_tokens or most, most)
        self._follower = Follower(self.drafter, first.tokens, _plan(first), end, chunk, self.ready)
        self._messages, self._read_at = 1, {1: arrived}
        return self.replies(incoming)

    def on_request(self, request: pb.ProposeRequest, arrived: float) -> None:
        self.extend(request)
        self._messages += 1
        self._read_at[self._messages] = arrived
        self._follower.arrived(request.tokens, _plan(request))

    async def work(self, incoming: Incoming[pb.ProposeRequest]) -> None:
        await self._follower.run()

    def next_reply(self) -> pb.ProposeResponse | None:
        found = None if self.ended else self._follower.take()
        if found is None:
            return None
        base, draft, drafted = found
        read = self._follower.answered
        read_at = self._read_at[read]
        self._read_at = {number: at for number, at in self._read_at.items() if number >= read}
        return pb.ProposeResponse(
            base_length=base,
            draft_tokens=draft.token_ids,
            proposed_by=[proposer.value for proposer in draft.proposed_by],
            drafted=drafted,
            queue_seconds=draft.queue_seconds,
            compute_seconds=draft.compute_seconds,
            messages_read=read,
            server_seconds=time.perf_counter() - read_at,
        )


def _plan(request: pb.ProposeRequest) -> DraftPlan:
    return DraftPlan(request.draft_ahead, request.send_first, request.send_more)


class DraftWorkerService(GeneratingService, DraftWorkerServicer):
    def __init__(
        self,
        info: ModelInfo,
        generate: GenerateMethod | None,
        drafting: Drafting,
        lifecycle: Lifecycle,
        lease_seconds: float = 60.0,
        limits: ServerLimits | None = None,
    ) -> None:
        super().__init__(DRAFT, info, generate)
        self._drafting, self._lifecycle = drafting, lifecycle
        self._lease_seconds, self._limits = lease_seconds, limits or ServerLimits()
        self._vocab_size = min(info.vocab_size, drafting.vocab_size)
        self.sessions = ProposalSessions(self._limits.max_proposal_bytes)

    async def Propose(self, request_iterator: AsyncIterator[pb.ProposeRequest], context: Context) -> Replies:
        opened: list[ProposalSession] = []
        async with contextlib.AsyncExitStack() as stack:

            async def session_of(request: pb.ProposeRequest) -> ProposalSession:
                if opened:
                    opened[0].extend(request)
                else:
                    opened.append(await stack.enter_async_context(self._session(request)))
                return opened[0]

            async def answer(request: pb.ProposeRequest, arrived: float) -> pb.ProposeResponse:
                return await (await session_of(request)).answer(request, arrived)

            async def follow(
                request: pb.ProposeRequest, arrived: float, incoming: Incoming[pb.ProposeRequest]
            ) -> Replies:
                session = await session_of(request)
                incoming.busy(False)
                async with contextlib.aclosing(session.follow(request, arrived, incoming)) as replies:
                    async for reply in replies:
                        yield reply

            answers = answered_in_order(
                request_iterator,
                answer,
                self._lease_seconds,
                run=follow,
                begins_run=lambda request: not opened and not request.HasField("speculation_length"),
            )
            async with contextlib.aclosing(answers):
                async for reply in answers:
                    yield reply

    @contextlib.asynccontextmanager
    async def _session(self, first: pb.ProposeRequest) -> AsyncGenerator[ProposalSession, None]:
        self.check_tokenizer(first.tokenizer_sha256)
        self.check(first, 0)
        if not first.tokens:
            raise InvalidField("tokens", "empty: at least one token is needed")
        request = proposing_from_wire(first)
        if request.rule is not Rule.AGREEMENT and not first.HasField("speculation_length"):
            raise InvalidField(
                "rule", "agreement alone, without speculation_length: nobody knows which draft is verified"
            )
        self._lifecycle.check()
        self._limits.check_sessions(self.sessions.owned_by(caller()))
        session = ProposalSession(self, self._drafting.drafter(request, self.info.vocab_size, SLOT_SECONDS))
        with self.sessions.one(session.owner):
            try:
                session.extend(first)
                await session.drafter.open(session.tokens[: first.prompt_length or len(session.tokens)])
                yield session
            finally:
                self.sessions.grow(session.owner, -len(session.tokens))
                await session.drafter.close()

    def check(self, request: pb.ProposeRequest, known: int) -> None:
        """Checks a message after `known` tokens. Raises InvalidField, TooLong."""
        for name, most in (("speculation_length", self.info.max_speculation_length), ("draft_ahead", MAX_DRAFTED)):
            if (given := getattr(request, name)) > most:
                raise InvalidField(name, f"{given} is above the maximum {most}")
        if not 0 <= request.least_probability <= 1:
            raise InvalidField("least_probability", f"{request.least_probability} is outside 0 to 1")
        if known + len(request.tokens) > self.info.max_sequence_length:
            raise TooLong(
                f"{known} known tokens and {len(request.tokens)} more: "
                f"together above the sequence length {self.info.max_sequence_length}"
            )
        check_tokens("tokens", list(request.tokens), self._vocab_size)
