"""Implements speculation's Drafter over the RPCs Propose and EndProposals of a DraftWorker."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from tandem.rpc import calls, wire
from tandem.rpc import wire_checks as check
from tandem.rpc.channel import DRAFT, open_channel, stub
from tandem.rpc.closing import SessionCloses
from tandem.rpc.credentials import Credentials
from tandem.rpc.errors import BrokenContract, TandemError, contract
from tandem.rpc.generation_client import GenerationClient
from tandem.rpc.request_context import outgoing
from tandem.speculation.estimate import Estimate
from tandem.speculation.fallible import DrafterHealth, DrafterLate, DrafterRefused
from tandem.speculation.outcomes import REQUESTS_OWN, Outcome
from tandem.speculation.types import (
    Draft,
    ModelInfo,
    Request,
    SpeculationStats,
    model_part,
)
from tandem.v1 import draft_worker_pb2 as pb

PROPOSE_SECONDS = 5.0
_END_SECONDS = 2.0
_SHARE = 0.3  # share of the time until a request's deadline that a hung worker may cost
_FAIR_SECONDS = 1.0  # a worker silent for this long has failed; a shorter timeout does not prove that


class TokenizerMismatch(ValueError):
    """The worker's tokenizer differs from ours."""


class DraftClient:
    """A channel to one DraftWorker, shared by the requests of a process, with the worker's `health`."""

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
        self.health, self.name = DrafterHealth(f"at {address}"), f"the DraftWorker at {address}"
        self._info: ModelInfo | None = None
        self.closes = SessionCloses()

    async def info(self, timeout: float, wait: bool = True) -> ModelInfo:
        """Returns the worker's model info, cached until it fails. Raises TandemError or TokenizerMismatch."""
        if self._info is None:
            info = await GenerationClient(self.channel, DRAFT).model_info(timeout, wait)
            if info.tokenizer_sha256 != self.tokenizer_sha256:
                raise TokenizerMismatch(
                    f"the tokenizer of the draft worker at {self.address} ({info.tokenizer_sha256[:12]}) is not the "
                    f"target's ({self.tokenizer_sha256[:12]}); draft and target must share a vocabulary"
                )
            self._info = info
        return self._info

    def forget(self) -> None:
        """Clears the cached info: the next worker to answer may be another one, with other limits."""
        self._info = None

    def end(self, session_id: str) -> int:
        """Ends a session in the background and returns the bytes sent. If that fails, the session's lease ends it."""
        request = pb.EndProposalsRequest(session_id=session_id)
        self.closes.begin(
            lambda: calls.unary(self.stub.EndProposals, request, timeout=_END_SECONDS, metadata=outgoing())
        )
        return request.ByteSize()

    async def close(self) -> None:
        """Waits briefly for pending session closes, then closes the channel."""
        await self.closes.settle()
        await self.channel.close()


class RemoteDrafter:
    """One proposal session, for one request of a target with `vocab_size` tokens.

    A call takes at most the client's `seconds`, and a share of the time until the request's deadline. Raises
    DrafterLate if that was too short to blame the worker, DrafterRefused if the worker refused the request, and
    TandemError if the worker failed. Counts bytes and the network time of answered calls into `stats`, and records the
    times of drafts and round trips in `estimate`.
    """

    def __init__(
        self,
        client: DraftClient,
        request: Request,
        vocab_size: int,
        stats: SpeculationStats,
        estimate: Estimate | None = None,
    ) -> None:
        self._client, self._request, self._vocab_size = client, request, vocab_size
        self._stats, self._estimate = stats, estimate
        self._session_id = ""
        self._known = self._prompt_length = 0

    async def open(self, prompt: Sequence[int]) -> None:
        """Sends the prompt to the worker. The time counts as prompt processing, not as network time."""
        self._session_id, self._known = uuid.uuid4().hex, 0
        self._prompt_length = len(prompt)
        await self._propose(prompt, 0, None)

    async def propose(self, tokens: Sequence[int], k: int, model_k: int | None = None) -> Draft:
        sent = time.perf_counter()
        answered = await self._propose(tokens, k, model_k)
        if answered is None:
            return Draft()
        reply, limits = answered
        seconds = time.perf_counter() - sent
        try:
            with contract(self._client.name):
                network_seconds = seconds - check.seconds("server_seconds", reply.server_seconds, seconds)
                draft = wire.draft_from_wire(reply, limits.vocab_size, self._vocab_size, k, self._request.rule, seconds)
        except BrokenContract:
            self._client.forget()
            raise
        self._stats.network_seconds += network_seconds
        if self._estimate:
            self._estimate.drafted(len(draft.token_ids), draft.compute_seconds)
            self._estimate.travelled(network_seconds)
        return draft

    async def close(self) -> None:
        """Ends the session without waiting for the answer, which may never come."""
        if self._session_id:
            self._stats.bytes_up += self._client.end(self._session_id)
            self._session_id = ""

    async def _propose(
        self, tokens: Sequence[int], k: int, model_k: int | None
    ) -> tuple[pb.ProposeResponse, ModelInfo] | None:
        """Returns the worker's reply and limits, or None if the sequence is too long for it.

        Resends all tokens if necessary.
        """
        now, seconds = time.monotonic(), self._client.seconds
        if self._request.deadline is not None:
            seconds = max(0.001, min(seconds, _SHARE * (self._request.deadline - now)))
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
                raise TandemError("ABORTED", "the worker does not know a session that has just begun")
        except TandemError as error:
            if error.outcome in REQUESTS_OWN:
                # A message about an invalid field may quote tokens, and refusals are logged.
                raise DrafterRefused(error.code if error.code == "INVALID_ARGUMENT" else str(error)) from None
            if error.outcome is Outcome.LATE and seconds < min(self._client.seconds, _FAIR_SECONDS):
                raise DrafterLate(str(error)) from None
            self._client.forget()
            raise
        self._known = len(tokens)
        return reply, limits

    async def _ask(self, tokens: Sequence[int], k: int, model_k: int | None, give_up: float) -> pb.ProposeResponse:
        first = self._known == 0
        request = pb.ProposeRequest(
            session_id=self._session_id,
            known_length=self._known,
            tokens=tokens[self._known :],
            speculation_length=k,
            model_speculation_length=most if (most := model_part(k, model_k)) < k else None,  # absent: all of them
            tokenizer_sha256=self._client.tokenizer_sha256 if first else "",
            prompt_length=self._prompt_length if first else 0,
        )
        if first:
            wire.proposing_to_wire(self._request, request)
        timeout = max(give_up - time.monotonic(), 0.001)
        reply: pb.ProposeResponse = await calls.unary(
            self._client.stub.Propose, request, self._stats, timeout=timeout, metadata=outgoing()
        )
        return reply
