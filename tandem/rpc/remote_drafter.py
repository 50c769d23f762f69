"""The drafter a network away: speculation's Drafter over Propose and EndProposals of a DraftWorker."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

from tandem.rpc import wire
from tandem.rpc.channel import DRAFT, open_channel, stub
from tandem.rpc.closing import Closes
from tandem.rpc.credentials import Credentials
from tandem.rpc.errors import TandemError, from_rpc
from tandem.rpc.generation_client import GenerationClient
from tandem.rpc.request_context import outgoing
from tandem.speculation.acceptance import known_prefix
from tandem.speculation.fallible import DrafterHealth, DrafterLate, DrafterRefused
from tandem.speculation.types import (
    Draft,
    InvalidField,
    ModelInfo,
    Proposer,
    Rule,
    SamplingParams,
    SparseDistribution,
    SpeculationStats,
    model_part,
)
from tandem.v1 import draft_worker_pb2 as pb

PROPOSE_SECONDS = 5.0
_END_SECONDS = 2.0
_SHARE = 0.3  # of the time until a request's deadline: what a worker that hangs may cost it
_FAIR_SECONDS = 1.0  # a worker that is silent for so long has failed; sooner it may be late
# What a worker says about one request and not about itself.
_REFUSALS = ("ABORTED", "ALREADY_EXISTS", "INVALID_ARGUMENT", "NOT_FOUND", "OUT_OF_RANGE", "RESOURCE_EXHAUSTED")


class OtherTokens(ValueError):
    """The worker's tokenizer is not ours."""


class DraftClient:
    """A channel to one DraftWorker, shared by the requests of a process; `health` is what they know about it."""

    def __init__(
        self,
        address: str,
        tokenizer_sha256: str,
        seconds: float = PROPOSE_SECONDS,
        credentials: Credentials | None = None,
    ) -> None:
        self.address, self.tokenizer_sha256, self.seconds = address, tokenizer_sha256, seconds
        self.channel = open_channel(address, credentials)
        self.stub: Any = stub(self.channel, DRAFT)
        self.health = DrafterHealth(f"at {address}")
        self._info: ModelInfo | None = None
        self.closes = Closes()

    async def info(self, timeout: float) -> ModelInfo:
        """What the worker runs, asked once while it lives. Raises TandemError, or OtherTokens."""
        if self._info is None:
            info = await GenerationClient(self.channel, DRAFT).model_info(timeout)
            if info.tokenizer_sha256 != self.tokenizer_sha256:
                raise OtherTokens(
                    f"the tokenizer of the draft worker at {self.address} ({info.tokenizer_sha256[:12]}) is not the "
                    f"target's ({self.tokenizer_sha256[:12]}); draft and target must share a vocabulary"
                )
            self._info = info
        return self._info

    def forget(self) -> None:
        """Whoever answers next may be another worker, with other limits."""
        self._info = None

    def end(self, session_id: str) -> int:
        """Frees a session's slot, beside whatever comes next; its lease frees it if that fails. Bytes sent."""
        request = pb.EndProposalsRequest(session_id=session_id)
        self.closes.begin(lambda: self._end(request))
        return request.ByteSize()

    async def _end(self, request: pb.EndProposalsRequest) -> None:
        try:
            await self.stub.EndProposals(request, timeout=_END_SECONDS, metadata=outgoing())
        except grpc.RpcError as error:
            raise from_rpc(error) from None

    async def close(self) -> None:
        """After the sessions that are being ended, waited for a moment."""
        await self.closes.settle()
        await self.channel.close()


class RemoteDrafter:
    """One session of proposals, for one request of a target with `vocab_size` tokens.

    A call takes at most the client's `seconds`, and a share of the time until `deadline` (monotonic seconds), the
    request's. Raises DrafterLate where that was too little to blame the worker, DrafterRefused, and TandemError where
    the worker is at fault.
    Counts bytes, and the network time of the calls that were answered, into `stats`.
    """

    def __init__(
        self,
        client: DraftClient,
        vocab_size: int,
        stats: SpeculationStats,
        rule: Rule = Rule.AGREEMENT,
        deadline: float | None = None,
    ) -> None:
        self._client, self._vocab_size, self._stats, self._rule = client, vocab_size, stats, rule
        self._deadline = deadline
        self._sampling = SamplingParams()
        self._session_id = ""
        self._known = 0

    async def open(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        """Lets the worker process the prompt. The time is all prompt processing, not the network's."""
        self._session_id, self._known, self._sampling = uuid.uuid4().hex, 0, sampling
        await self._propose(prompt, 0, None)

    async def propose(self, tokens: Sequence[int], k: int, model_k: int | None = None) -> Draft:
        sent = time.perf_counter()
        reply = await self._propose(tokens, k, model_k)
        if reply is None:
            return Draft()
        self._stats.network_seconds += max(0.0, time.perf_counter() - sent - reply.server_seconds)
        drafted = known_prefix(reply.draft_tokens, self._vocab_size)[:k]
        proposed_by = tuple(_proposer(name) for name in reply.proposed_by[: len(drafted)])
        return Draft(
            drafted,
            reply.queue_seconds,
            reply.compute_seconds,
            proposed_by if len(proposed_by) == len(drafted) else (Proposer.MODEL,) * len(drafted),
            self._distributions(reply)[: len(drafted)],
            max(1, reply.step_rows),
        )

    def _distributions(self, reply: pb.ProposeResponse) -> tuple[SparseDistribution, ...]:
        """What the tokens were drawn from. One that reaches beyond our vocabulary would bias the law if it were cut."""
        try:
            found = wire.distributions_from_wire(reply.distributions, reply.draft_tokens)
        except InvalidField as error:
            raise DrafterRefused(f"the worker's {error.field} cannot be") from None
        if any(token >= self._vocab_size for each in found for token in each.token_ids):
            raise DrafterRefused("the worker draws from tokens that the target does not have")
        return found

    async def close(self) -> None:
        """Ends the session without waiting for the answer: it may never come."""
        if self._session_id:
            self._stats.bytes_up += self._client.end(self._session_id)
            self._session_id = ""

    async def _propose(self, tokens: Sequence[int], k: int, model_k: int | None) -> pb.ProposeResponse | None:
        """The worker's reply, or None where the sequence is too long for it. Sends all tokens again if need be."""
        now, seconds = time.monotonic(), self._client.seconds
        if self._deadline is not None:
            seconds = max(0.001, min(seconds, _SHARE * (self._deadline - now)))
        give_up = now + seconds
        try:
            limits = await self._client.info(seconds)
            if len(tokens) >= limits.max_sequence_length:
                return None
            k = min(k, limits.max_speculation_length)
            reply = await self._ask(tokens, k, model_k, give_up)
            if reply.unknown:
                self._known = 0
                reply = await self._ask(tokens, k, model_k, give_up)
            if reply.unknown:
                raise TandemError("ABORTED", "the worker says that it does not know a session that begins")
        except TandemError as error:
            if error.code in _REFUSALS:
                # What is said of a field may quote tokens, and a refusal ends in a log.
                raise DrafterRefused(error.code if error.code == "INVALID_ARGUMENT" else str(error)) from None
            if error.code == "DEADLINE_EXCEEDED" and seconds < min(self._client.seconds, _FAIR_SECONDS):
                raise DrafterLate(str(error)) from None
            self._client.forget()
            raise
        self._known = len(tokens)
        return reply

    async def _ask(self, tokens: Sequence[int], k: int, model_k: int | None, give_up: float) -> pb.ProposeResponse:
        first = self._known == 0
        request = pb.ProposeRequest(
            session_id=self._session_id,
            known_length=self._known,
            tokens=tokens[self._known :],
            speculation_length=k,
            model_speculation_length=model_part(k, model_k),
            sampling=wire.sampling_to_wire(self._sampling) if first else None,
            tokenizer_sha256=self._client.tokenizer_sha256 if first else "",
            rule=wire.rule_to_wire(self._rule) if first else None,
        )
        reply: pb.ProposeResponse = await self._call(self._client.stub.Propose, request, give_up - time.monotonic())
        return reply

    async def _call(self, method: Callable[..., Awaitable[Any]], request: Any, timeout: float) -> Any:
        self._stats.bytes_up += request.ByteSize()
        try:
            reply = await method(request, timeout=max(timeout, 0.001), metadata=outgoing())
        except grpc.RpcError as error:
            raise from_rpc(error) from None
        self._stats.bytes_down += reply.ByteSize()
        return reply


def _proposer(name: str) -> Proposer:
    """Workers to come may have drafters that are not known here; what is not copied is a model's."""
    return Proposer.NGRAM if name == Proposer.NGRAM.value else Proposer.MODEL
