"""The target a network away: speculation's Verifier over OpenSession, Verify and CloseSession."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from clients import wire
from clients.channel import TARGET, open_channel, stub
from clients.credentials import Credentials
from clients.errors import TandemError, from_rpc
from clients.generation import GenerationClient
from speculation.pipeline import Answer
from speculation.types import ModelInfo, Rule, SamplingParams, SparseDistribution, SpeculationStats, Verdict
from tandem.v1 import target_verifier_pb2 as pb

_RETRY_SECONDS = 0.2  # where a server refuses for lack of slots without saying for how long


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds for each call; `admission` is how long a full server is asked again."""

    open: float = 120.0
    verify: float = 30.0
    close: float = 2.0
    admission: float = 600.0


class VerifierClient:
    """A channel to one TargetVerifier, shared by the requests of a process."""

    def __init__(
        self,
        address: str,
        tokenizer_sha256: str,
        deadlines: Deadlines | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        self.address, self.tokenizer_sha256 = address, tokenizer_sha256
        self.deadlines = deadlines or Deadlines()
        self.streams: bool | None = None  # whether the server knows VerifyStream; None: not tried yet
        self.channel = open_channel(address, credentials)
        self.stub: Any = stub(self.channel, TARGET)

    async def model_info(self, timeout: float = 30.0) -> ModelInfo:
        """What the verifier runs; waits up to `timeout` seconds for it. Raises TandemError."""
        try:
            return await GenerationClient(self.channel, TARGET).model_info(timeout)
        except TandemError as error:
            raise TandemError(error.code, f"no TargetVerifier at {self.address}: {error.message}") from None

    async def close(self) -> None:
        await self.channel.close()


class RemoteVerifier:
    """One session of a TargetVerifier, for one request. Counts bytes and network time into `stats`."""

    def __init__(
        self,
        client: VerifierClient,
        stats: SpeculationStats,
        margins: bool = False,
        rule: Rule = Rule.AGREEMENT,
    ) -> None:
        self.client, self._stats, self._margins, self._rule = client, stats, margins, rule
        self._session_id = ""
        self._prompt_length = 0
        self._sampling = SamplingParams()

    async def open(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        self._session_id = uuid.uuid4().hex
        self._prompt_length, self._sampling = len(prompt), sampling
        await self._open(prompt)

    async def _open(self, prefix: Sequence[int]) -> None:
        """Opens the session, or opens it again with all that is committed; asks a full server until it has a slot."""
        request = pb.OpenSessionRequest(
            session_id=self._session_id,
            prefix=prefix,
            prompt_length=self._prompt_length,
            sampling=wire.sampling_to_wire(self._sampling),
            rule=wire.rule_to_wire(self._rule),
            tokenizer_sha256=self.client.tokenizer_sha256,
        )
        give_up = time.monotonic() + self.client.deadlines.admission
        while True:
            try:
                reply = await self._call(self.client.stub.OpenSession, request, self.client.deadlines.open)
                return self._check_rule(reply.rule)
            except TandemError as error:
                wait = error.retry_seconds or _RETRY_SECONDS
                if error.code != "RESOURCE_EXHAUSTED" or time.monotonic() + wait > give_up:
                    raise
                await asyncio.sleep(wait)

    def _check_rule(self, replied: int) -> None:
        """A server from before the rules were told apart says nothing, and means agreement."""
        if replied != wire.rule_to_wire(self._rule) and (replied or self._rule is not Rule.AGREEMENT):
            raise TandemError(
                "FAILED_PRECONDITION",
                f"rule: the TargetVerifier at {self.client.address} does not verify by {self._rule.value}, which was "
                f"asked for; it says {wire.rule_name(replied)}",
            )

    async def verify(
        self, tokens: Sequence[int], draft: Sequence[int], distributions: Sequence[SparseDistribution] = ()
    ) -> Verdict:
        request = self.request(len(tokens), tokens[-1], draft, distributions)
        try:
            answer = await self.ask(request)
        except TandemError as error:
            if error.code != "NOT_FOUND":  # the lease ran out, or the server is a new one
                raise
            await self.reopen(tokens)
            answer = await self.ask(request)
        self._stats.network_seconds += answer.network_seconds
        if answer.verdict is None:
            raise TandemError(
                "ABORTED", f"round at {len(tokens)} is stale: the verifier holds {answer.committed_length} tokens"
            )
        return answer.verdict

    def request(
        self,
        base_length: int,
        last_token: int,
        draft: Sequence[int],
        distributions: Sequence[SparseDistribution] = (),
    ) -> pb.VerifyRequest:
        """A round of this session."""
        return pb.VerifyRequest(
            session_id=self._session_id,
            base_length=base_length,
            last_token=last_token,
            draft_tokens=draft,
            report_margins=self._margins,
            distributions=wire.distributions_to_wire(distributions),
        )

    async def ask(self, request: pb.VerifyRequest) -> Answer:
        """One round by a call of its own. Raises TandemError."""
        sent = time.perf_counter()
        reply = await self._call(self.client.stub.Verify, request, self.client.deadlines.verify)
        return wire.answer_from_wire(reply, time.perf_counter() - sent)

    async def reopen(self, tokens: Sequence[int]) -> None:
        """Opens the session again with all that is committed. Raises TandemError."""
        await self._open(tokens)

    async def close(self) -> None:
        """Frees the slot, also while this task is being cancelled; the lease frees it if the call fails."""
        if not self._session_id:
            return
        request = pb.CloseSessionRequest(session_id=self._session_id)
        self._session_id = ""
        call = self._call(self.client.stub.CloseSession, request, self.client.deadlines.close)
        with contextlib.suppress(TandemError):
            await asyncio.shield(asyncio.ensure_future(call))

    async def _call(self, method: Callable[..., Awaitable[Any]], request: Any, timeout: float) -> Any:
        self._stats.bytes_up += request.ByteSize()
        try:
            reply = await method(request, timeout=timeout)
        except grpc.RpcError as error:
            raise from_rpc(error) from None
        self._stats.bytes_down += reply.ByteSize()
        return reply
