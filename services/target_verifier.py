"""TargetVerifier service: verification sessions and Generate."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace

from tandem.engine.engine import OPENING_BYTES, Engine
from tandem.engine.generator import check_tokens
from tandem.engine.sequences import TargetSequence
from tandem.rpc import wire
from tandem.rpc.channel import TARGET
from tandem.rpc.request_context import current
from tandem.rpc.wire_sessions import distributions_from_wire, session_from_wire
from tandem.services.calls import Context
from tandem.services.generation import GenerateMethod, GeneratingService
from tandem.services.security.callers import caller
from tandem.services.security.limits import ServerLimits, check_name
from tandem.services.server_duplex import answered_in_order
from tandem.services.sessions.table import (
    Checkout,
    Fence,
    Session,
    SessionConflict,
    SessionKey,
    SessionTable,
    session_key,
)
from tandem.services.shutdown import Lifecycle
from tandem.services.statuses import ModelMismatch
from tandem.services.verify_runs import VerifyRuns, commit, recorded
from tandem.speculation.features import FeatureSpec
from tandem.speculation.run_on import MAX_UNREAD
from tandem.speculation.types import InvalidField, ModelInfo, Request, Rule, SparseDistribution, TooLong
from tandem.v1 import generation_pb2, target_verifier_pb2_grpc
from tandem.v1 import target_verifier_pb2 as pb

MOST_LAYERS = 8
OPENING_SECONDS = 0.5  # wait for a slot; then the call fails, but its queue position is kept for a retry


class TargetVerifierService(GeneratingService, target_verifier_pb2_grpc.TargetVerifierServicer):
    def __init__(
        self,
        engine: Engine,
        info: ModelInfo,
        generate: GenerateMethod,
        lifecycle: Lifecycle,
        lease_seconds: float = 60.0,
        limits: ServerLimits | None = None,
        opening_seconds: float = OPENING_SECONDS,
    ) -> None:
        super().__init__(TARGET, replace(info, max_unread_tokens=MAX_UNREAD), generate, engine.adapters)
        self._engine, self._lifecycle = engine, lifecycle
        self._limits, self._opening_seconds = limits or ServerLimits(), opening_seconds
        self._waiting: Counter[str] = Counter()  # openings that wait for a slot, by caller
        self.sessions = SessionTable(time.monotonic, lease_seconds)
        self.checkout = Checkout(self.sessions)
        self._runs = VerifyRuns(self.sessions, info, self.checkout.using)

    async def OpenSession(self, request: pb.OpenSessionRequest, context: Context) -> pb.OpenSessionResponse:
        key = session_key(caller(), request.session_id)
        wanted = self._check_open(request)
        session = self.sessions.find(key)
        if session is None:
            session = await self._admitted(key, request, wanted)
        async with self.checkout.using(session):
            processing = await self._engine.processing(wanted, request.prompt_length, request.prefix)
            if processing and session.prompt_length != request.prompt_length:
                raise SessionConflict(f"session {key} is open with a prompt of {session.prompt_length} tokens")
            if len(request.prefix) >= session.max_total_tokens:
                raise TooLong(
                    f"the prefix has {len(request.prefix)} tokens and the session was opened for "
                    f"max_total_tokens {session.max_total_tokens}"
                )
            session.end_run()
            session.resume(list(request.prefix), wanted)
            session.sequence.processing = processing
            reply = await self._fill(session, request.run_follows)
            if wanted.features is not None:
                reply.features.CopyFrom(await opening_features(session.sequence, wanted.features, request))
            return reply

    async def _admitted(self, key: SessionKey, request: pb.OpenSessionRequest, wanted: Request) -> Session:
        self.checkout.expire()
        self._check_new(key)
        self._waiting[key.owner] += 1
        try:
            length, seconds = request.prompt_length, self._opening_seconds
            sequence = await TargetSequence.admitted(self._engine, wanted, length, seconds, key)
        finally:
            self._waiting -= Counter([key.owner])
        try:
            session = self.sessions.find(key)
            if session is not None:
                sequence.close()
                return session
            self._check_new(key)
            call, total, prefix = current(), self._max_total(request), list(request.prefix)
            identity = call.id if call else ""
            return self.sessions.admit(Session(key, sequence, wanted, prefix, total, request.prompt_length, identity))
        except Exception:
            sequence.close()
            raise

    def _check_new(self, key: SessionKey) -> None:
        # Repeated after waiting for a slot.
        self._lifecycle.check()
        self.sessions.check_new(key)
        self._limits.check_sessions(self.sessions.owned_by(key.owner) + self._waiting[key.owner])

    async def Verify(self, request: pb.VerifyRequest, context: Context) -> pb.VerifyResponse:
        return await self._verify(request, time.perf_counter())

    def VerifyStream(
        self, request_iterator: AsyncIterator[pb.VerifyRequest], context: Context
    ) -> AsyncGenerator[pb.VerifyResponse, None]:
        return answered_in_order(
            request_iterator,
            self._verify,
            self.sessions.lease_seconds,
            run=self._runs.replies,
            begins_run=lambda request: request.HasField("run_until"),
        )

    async def _verify(self, request: pb.VerifyRequest, arrived: float) -> pb.VerifyResponse:
        session = self.sessions.touch(session_key(caller(), request.session_id))
        self._check_draft(session, request)
        distributions = self._distributions(session, request) if request.distributions else ()
        async with self.checkout.using(session):
            fence = session.fence(request.base_length, request.last_token)
            if fence is Fence.APPLY:
                session.end_run()
                session.steps += 1
                verdict = await session.sequence.verify(session.tokens, request.draft_tokens, distributions)
                reply = commit(session, request.draft_tokens, verdict)
            elif fence is Fence.REPLAY:
                reply = recorded(session)
            else:
                reply = pb.VerifyResponse(stale=True, committed_length=len(session.tokens))
        reply.server_seconds = time.perf_counter() - arrived
        return reply

    async def CloseSession(self, request: pb.CloseSessionRequest, context: Context) -> pb.CloseSessionResponse:
        key = session_key(caller(), request.session_id)
        session = self.sessions.find(key)
        closed = self.checkout.drop(key)
        if session is None:
            return pb.CloseSessionResponse(closed=closed)
        steps, length = session.steps, len(session.tokens)
        return pb.CloseSessionResponse(closed=closed, steps=steps, committed_length=length)

    async def _fill(self, session: Session, run_follows: bool) -> pb.OpenSessionResponse:
        prefix, sequence = session.tokens, session.sequence
        reused = sequence.truncate_to(prefix[:-1])
        waited, worked = sequence.queue_seconds, sequence.compute_seconds
        reused += await sequence.begin(prefix, run_follows)
        session.stats.prefill_seconds += sequence.queue_seconds + sequence.compute_seconds - waited - worked
        return pb.OpenSessionResponse(
            committed_length=len(session.tokens),
            reused_length=reused,
            lease_seconds=self.sessions.lease_seconds,
            queue_seconds=sequence.queue_seconds - waited,
            prefill_seconds=sequence.compute_seconds - worked,
            max_speculation_length=self.info.max_speculation_length,
            rule=wire.RULES[session.request.rule],
            processed_fields=session.request.sampling.processed,
            max_unread_tokens=MAX_UNREAD if session.request.rule is Rule.AGREEMENT else 0,
            adapter_revision=self._engine.adapters.revision(session.request.adapter),
        )

    def _check_open(self, request: pb.OpenSessionRequest) -> Request:
        """Returns the session's request. Raises InvalidField, TooLong, ModelMismatch, VocabularyMismatch."""
        for name in ("weights_revision", "dtype", "adapter", "adapter_revision"):
            check_name(name, getattr(request, name))
        if not request.prefix:
            raise InvalidField("prefix", "empty: at least one token is needed")
        if not 1 <= request.prompt_length <= len(request.prefix):
            raise InvalidField(
                "prompt_length", f"{request.prompt_length} is outside 1 to {len(request.prefix)}, the prefix's length"
            )
        self.check_tokenizer(request.tokenizer_sha256)
        for name in ("weights_revision", "dtype", "vocab_size"):
            expected, ours = getattr(request, name), getattr(self.info, name)
            if expected and expected != ours:
                raise ModelMismatch(f"{name}: the client expects {expected}, but this target has {ours}")
        revision = self._engine.adapters.revision(request.adapter)
        if request.adapter_revision and request.adapter_revision != revision:
            raise InvalidField("adapter_revision", f"this target's {request.adapter} is {revision[:12] or 'none'}")
        total = self._max_total(request)
        if len(request.prefix) >= total:
            raise TooLong(f"the prefix has {len(request.prefix)} tokens and the sequence length is {total}")
        check_tokens("prefix", list(request.prefix), self.info.vocab_size)
        wanted = session_from_wire(request, features_granted(self._engine, request), total)
        self._engine.admit(wanted)
        return wanted

    def _max_total(self, request: pb.OpenSessionRequest) -> int:
        limit = self.info.max_sequence_length
        total = request.max_total_tokens if request.HasField("max_total_tokens") else limit
        if total > limit:
            raise TooLong(f"max_total_tokens: {total} is above the sequence length {limit}")
        return total

    def _check_draft(self, session: Session, request: pb.VerifyRequest) -> None:
        drafted, most = len(request.draft_tokens), self.info.max_speculation_length
        if drafted > most:
            raise InvalidField("draft_tokens", f"{drafted} tokens are above the maximum speculation length {most}")
        check_tokens("draft_tokens", list(request.draft_tokens), self.info.vocab_size)
        check_tokens("last_token", [request.last_token], self.info.vocab_size)
        if request.base_length + drafted + 1 > session.max_total_tokens:
            raise TooLong(
                f"base_length {request.base_length} and a round of up to {drafted + 1} tokens: "
                f"together above the sequence length {session.max_total_tokens}"
            )

    def _distributions(self, session: Session, request: pb.VerifyRequest) -> tuple[SparseDistribution, ...]:
        # Wrong distributions would silently bias the output.
        rule = session.request.rule
        if rule is not Rule.REJECTION:
            raise InvalidField("distributions", f"{len(request.distributions)}, but {rule.value} takes none")
        distributions = distributions_from_wire(request.distributions, request.draft_tokens)
        for i, each in enumerate(distributions):
            check_tokens(f"distributions[{i}].token_ids", each.token_ids, self.info.vocab_size)
        return distributions


def features_granted(engine: Engine, request: pb.OpenSessionRequest) -> FeatureSpec | None:
    """Returns the features in a session's verdicts, or None. Raises InvalidField."""
    if len(request.features.layers) > MOST_LAYERS:
        raise InvalidField("features.layers", f"{len(request.features.layers)} exceed {MOST_LAYERS}")
    if engine.features is None or not request.HasField("features"):
        return None
    if request.features.format > generation_pb2.FEATURE_FORMAT_BFLOAT16:
        raise InvalidField("features.format", f"{request.features.format} is unknown: features are in bfloat16")
    return engine.features.spec(request.features.layers)


async def opening_features(sequence: TargetSequence, spec: FeatureSpec, request: pb.OpenSessionRequest) -> pb.Features:
    """Returns the prefix's features from the requested position, as many as fit in a message."""
    end = len(request.prefix) - 1
    start = min(max(request.features.start, end - OPENING_BYTES // spec.position_bytes), end)
    return pb.Features(start=start, values=await sequence.features(spec, start, end))
