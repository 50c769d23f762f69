"""TargetVerifier service: sessions that verify clients' drafts, and Generate."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import grpc

from tandem.engine.generator import check_tokens
from tandem.engine.sequences import Engine, TargetSequence
from tandem.rpc import wire
from tandem.services.errors import ModelMismatch, VocabularyMismatch
from tandem.services.generation import GenerateMethod
from tandem.services.lifecycle import Lifecycle
from tandem.services.security.identity import caller
from tandem.services.security.limits import ServerLimits
from tandem.services.security.names import check_name
from tandem.services.sessions import checkout
from tandem.services.sessions.costs import Note, SessionCosts
from tandem.services.sessions.features import features_granted, opening_features
from tandem.services.sessions.table import Fence, SessionConflict, SessionKey, SessionTable, session_key
from tandem.services.verify_runs import VerifyResources, VerifyRuns, VerifySession, max_unread
from tandem.services.verify_stream import answered_in_order
from tandem.speculation.types import (
    InvalidField,
    ModelInfo,
    Rule,
    SamplingParams,
    SparseDistribution,
    TooLong,
    check_logprobs,
)
from tandem.v1 import target_verifier_pb2 as pb
from tandem.v1 import target_verifier_pb2_grpc

OPENING_SECONDS = 0.5
"""How long OpenSession waits for a slot. A caller refused after that keeps its place in the queue for its retry."""


class TargetVerifierService(target_verifier_pb2_grpc.TargetVerifierServicer):
    """Each RPC checks its request, locks the session, runs the step and builds the reply."""

    def __init__(
        self,
        engine: Engine,
        info: ModelInfo,
        generate: GenerateMethod,
        lifecycle: Lifecycle,
        lease_seconds: float = 60.0,
        limits: ServerLimits | None = None,
        opening_seconds: float = OPENING_SECONDS,
        note: Note | None = None,
    ) -> None:
        self._engine, self._info, self._generate, self._lifecycle = engine, info, generate, lifecycle
        self._limits, self._opening_seconds = limits or ServerLimits(), opening_seconds
        self._waiting: Counter[str] = Counter()  # openings that wait for a slot, by caller
        self.sessions: SessionTable[VerifyResources, pb.VerifyResponse] = SessionTable(time.monotonic, lease_seconds)
        self._note = note
        self.sessions.on_end.append(self._report_costs)
        self._runs = VerifyRuns(self.sessions, engine, info, self._using)

    async def GetModelInfo(
        self, request: pb.TargetVerifierGetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.TargetVerifierGetModelInfoResponse:
        info = replace(self._info, adapters=tuple(self._engine.adapters.revisions.items()))
        return pb.TargetVerifierGetModelInfoResponse(model=wire.info_to_wire(info))

    def Generate(
        self, request: pb.TargetVerifierGenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[pb.TargetVerifierGenerateResponse, None]:
        return self._generate.stream(request, context.time_remaining())

    async def OpenSession(
        self, request: pb.OpenSessionRequest, context: grpc.aio.ServicerContext
    ) -> pb.OpenSessionResponse:
        key = session_key(caller(), request.session_id)
        sampling, rule = self._check_open(request), wire.rule_from_wire(request.rule)
        features = features_granted(self._engine, request)
        processing = await self._engine.processing(sampling, request.prompt_length, request.prefix)
        session = self.sessions.find(key)
        if session is None:
            session = await self._admitted(key, request, sampling, rule)
        async with self._using(session):
            if processing and session.resources.prompt_length != request.prompt_length:
                raise SessionConflict(
                    f"session {key} is open with a prompt of {session.resources.prompt_length} tokens"
                )
            if session.resources.adapter != request.adapter:
                raise SessionConflict(f"session {key} is open with adapter {session.resources.adapter or 'none'}")
            if session.resources.opened and session.resources.features != features:
                raise SessionConflict(f"session {key} is open with other features")
            if len(request.prefix) >= session.max_total_tokens:
                raise TooLong(
                    f"the prefix has {len(request.prefix)} tokens and the session was opened for "
                    f"max_total_tokens {session.max_total_tokens}"
                )
            session.resources.end_run()
            session.resume(list(request.prefix), sampling, rule)
            session.resources.sequence.processing = processing
            session.resources.features = features
            reply = await self._fill(session)
            if features is not None:
                reply.features.CopyFrom(await opening_features(session.resources.sequence, features, request))
            return reply

    async def _admitted(
        self, key: SessionKey, request: pb.OpenSessionRequest, sampling: SamplingParams, rule: Rule
    ) -> VerifySession:
        """Returns a new session, after queueing for a slot; or the one that a duplicate call opened in the meantime."""
        await checkout.expire(self.sessions, self._free)
        adapters, slots = self._engine.adapters, self._engine.slots
        with adapters.taken(request.adapter) as adapter:
            total = self._max_total(request)
            slot = await self._slot(key, total)
            try:
                session = self.sessions.find(key)
                if session is not None:
                    slots.release(slot)
                    adapters.give_back(adapter)
                    return session
                self._check_new(key)
                sequence = TargetSequence(self._engine, slot, adapter)
                resources = VerifyResources(sequence, request.prompt_length, request.adapter)
                resources.costs = SessionCosts(request.prompt_length) if self._note else None
                return self.sessions.admit(key, resources, sampling, list(request.prefix), total, rule)
            except Exception:
                slots.release(slot)
                raise

    async def _slot(self, key: SessionKey, total: int) -> int:
        self._check_new(key)
        self._waiting[key.owner] += 1
        try:
            return await self._engine.slots.acquire(self._opening_seconds, key, total)
        finally:
            self._waiting -= Counter([key.owner])

    def _check_new(self, key: SessionKey) -> None:
        """Checks that the caller may open a session with this id now. Repeated after waiting for a slot."""
        self._lifecycle.check()
        self.sessions.check_new(key)
        self._limits.check_sessions(self.sessions.owned_by(key.owner) + self._waiting[key.owner])

    async def Verify(self, request: pb.VerifyRequest, context: grpc.aio.ServicerContext) -> pb.VerifyResponse:
        return await self._verify(request, time.perf_counter())

    def VerifyStream(
        self, request_iterator: AsyncIterator[pb.VerifyRequest], context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[pb.VerifyResponse, None]:
        return answered_in_order(
            request_iterator,
            self._verify,
            self.sessions.lease_seconds,
            run=self._runs.replies,
            begins_run=lambda request: request.HasField("run_until"),
        )

    async def _verify(self, request: pb.VerifyRequest, arrived: float) -> pb.VerifyResponse:
        """Runs one round, from Verify or VerifyStream."""
        session = self.sessions.touch(session_key(caller(), request.session_id))
        self._check_draft(session, request)
        check_logprobs(wire.logprobs_asked(request))
        self._engine.admit(session.sampling, wire.logprobs_asked(request))
        distributions = self._distributions(session, request)
        async with self._using(session):
            reply = await self._round(session, request, distributions)
        reply.server_seconds = time.perf_counter() - arrived
        return reply

    async def CloseSession(
        self, request: pb.CloseSessionRequest, context: grpc.aio.ServicerContext
    ) -> pb.CloseSessionResponse:
        key = session_key(caller(), request.session_id)
        session = self.sessions.find(key)
        closed = await checkout.drop(self.sessions, key, self._free)
        if session is None:
            return pb.CloseSessionResponse(closed=closed)
        steps, length = session.resources.steps, len(session.tokens)
        return pb.CloseSessionResponse(closed=closed, steps=steps, committed_length=length)

    async def expire_forever(self) -> None:
        """Frees sessions when their lease expires. Runs until cancelled."""
        await checkout.expire_forever(self.sessions, self._free)

    async def stop(self) -> None:
        """Reports the costs of the sessions that are still open."""
        for session in self.sessions:
            self._report_costs(session, "stopped")

    def _report_costs(self, session: VerifySession, how: str) -> None:
        if self._note and session.resources.costs and session.resources.opened:
            session.resources.costs.report(how, self._note)

    def _using(self, session: VerifySession) -> AbstractAsyncContextManager[None]:
        return checkout.using(self.sessions, session, self._free)

    async def _free(self, session: VerifySession) -> None:
        session.resources.sequence.release()
        self._engine.slots.release(session.resources.sequence.slot)

    async def _fill(self, session: VerifySession) -> pb.OpenSessionResponse:
        prefix, sequence = session.tokens, session.resources.sequence
        reused = sequence.keep(prefix[:-1])
        waited, worked = sequence.queue_seconds, sequence.compute_seconds
        reused += await sequence.fill(prefix[:-1])
        if session.resources.costs:
            spent = sequence.queue_seconds + sequence.compute_seconds - waited - worked
            session.resources.costs.stats.prefill_seconds += spent
        return pb.OpenSessionResponse(
            committed_length=len(session.tokens),
            reused_length=reused,
            lease_seconds=self.sessions.lease_seconds,
            queue_seconds=sequence.queue_seconds - waited,
            prefill_seconds=sequence.compute_seconds - worked,
            max_speculation_length=self._info.max_speculation_length,
            rule=wire.rule_to_wire(session.rule),
            processed_fields=session.sampling.processed,
            max_unread_tokens=max_unread(session.rule),
            adapter_revision=self._engine.adapters.revision(session.resources.adapter),
        )

    async def _round(
        self,
        session: VerifySession,
        request: pb.VerifyRequest,
        distributions: tuple[SparseDistribution, ...],
    ) -> pb.VerifyResponse:
        fence = session.fence(request.base_length, request.last_token)
        if fence is Fence.STALE:
            return pb.VerifyResponse(stale=True, committed_length=len(session.tokens))
        if fence is Fence.REPLAY:
            replay = pb.VerifyResponse()
            replay.CopyFrom(session.recorded)
            replay.replayed = True
            return replay
        session.resources.end_run()
        session.resources.steps += 1
        verdict = await session.resources.sequence.verify(
            session.tokens,
            request.draft_tokens,
            session.sampling,
            request.report_margins,
            session.rule,
            distributions,
            wire.logprobs_asked(request),
            session.resources.features,
        )
        reply = wire.verdict_to_wire(verdict, len(session.tokens) + len(verdict.token_ids))
        session.commit(verdict.token_ids, reply)
        if session.resources.costs:
            session.resources.costs.stats.observe(request.draft_tokens, verdict)
        return reply

    def _check_open(self, request: pb.OpenSessionRequest) -> SamplingParams:
        for name in ("tokenizer_sha256", "weights_revision", "dtype", "adapter", "adapter_revision"):
            check_name(name, getattr(request, name))
        if not request.prefix:
            raise InvalidField("prefix", "empty: at least one token is needed")
        if not 1 <= request.prompt_length <= len(request.prefix):
            raise InvalidField(
                "prompt_length", f"{request.prompt_length} is outside 1 to {len(request.prefix)}, the prefix's length"
            )
        if request.tokenizer_sha256 and request.tokenizer_sha256 != self._info.tokenizer_sha256:
            raise VocabularyMismatch(
                f"the client's tokenizer {request.tokenizer_sha256[:12]} is not the target's "
                f"{self._info.tokenizer_sha256[:12]}: draft and target must share a vocabulary"
            )
        for name in ("weights_revision", "dtype", "vocab_size"):
            expected, ours = getattr(request, name), getattr(self._info, name)
            if expected and expected != ours:
                raise ModelMismatch(f"{name}: the client expects {expected}, but this target has {ours}")
        revision = self._engine.adapters.revision(request.adapter)
        if request.adapter_revision and request.adapter_revision != revision:
            raise InvalidField("adapter_revision", f"this target's {request.adapter} is {revision[:12] or 'none'}")
        total = self._max_total(request)
        if len(request.prefix) >= total:
            raise TooLong(f"the prefix has {len(request.prefix)} tokens and the sequence length is {total}")
        check_tokens("prefix", list(request.prefix), self._info.vocab_size)
        sampling = wire.sampling_from_wire(request.sampling)
        self._engine.admit(sampling)
        return sampling

    def _max_total(self, request: pb.OpenSessionRequest) -> int:
        limit = self._info.max_sequence_length
        total = request.max_total_tokens if request.HasField("max_total_tokens") else limit
        if total > limit:
            raise TooLong(f"max_total_tokens: {total} is above the sequence length {limit}")
        return total

    def _check_draft(self, session: VerifySession, request: pb.VerifyRequest) -> None:
        drafted, most = len(request.draft_tokens), self._info.max_speculation_length
        if drafted > most:
            raise InvalidField("draft_tokens", f"{drafted} tokens are above the maximum speculation length {most}")
        check_tokens("draft_tokens", list(request.draft_tokens), self._info.vocab_size)
        check_tokens("last_token", [request.last_token], self._info.vocab_size)
        if request.base_length + drafted + 1 > session.max_total_tokens:
            raise TooLong(
                f"base_length {request.base_length} and a round of up to {drafted + 1} tokens: "
                f"together above the sequence length {session.max_total_tokens}"
            )

    def _distributions(self, session: VerifySession, request: pb.VerifyRequest) -> tuple[SparseDistribution, ...]:
        """Returns the draft tokens' distributions, checked: a wrong one would silently bias the output."""
        if request.distributions and session.rule is not Rule.REJECTION:
            raise InvalidField("distributions", f"{len(request.distributions)}, but {session.rule.value} takes none")
        distributions = wire.distributions_from_wire(request.distributions, request.draft_tokens)
        for i, each in enumerate(distributions):
            check_tokens(f"distributions[{i}].token_ids", each.token_ids, self._info.vocab_size)
        return distributions
