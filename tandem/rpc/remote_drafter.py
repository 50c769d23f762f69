"""Implements Drafter over Propose, waiting for each draft."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from tandem.rpc import wire_checks as check
from tandem.rpc.channel import DRAFT, open_channel, stub
from tandem.rpc.credentials import Credentials
from tandem.rpc.duplex import Duplex
from tandem.rpc.errors import BrokenContract, TandemError
from tandem.rpc.generation_client import GenerationClient
from tandem.rpc.request_context import outgoing
from tandem.rpc.wire_sessions import draft_from_wire, proposing_to_wire
from tandem.speculation.drafters import Drafter
from tandem.speculation.errors import REQUESTS_OWN, Outcome
from tandem.speculation.estimate import Estimate
from tandem.speculation.fallible import DrafterHealth, DrafterLate, DrafterRefused
from tandem.speculation.types import Draft, InvalidField, ModelInfo, Request, SpeculationStats, model_part
from tandem.v1 import draft_worker_pb2 as pb

PROPOSE_SECONDS = 5.0
_SHARE = 0.3  # share of the time until a request's deadline that a hung worker may cost
_FAIR_SECONDS = 1.0  # a worker silent for this long has failed; a shorter timeout does not prove that


class TokenizerMismatch(ValueError):
    """The worker's tokenizer differs from ours."""


class DraftClient:
    """A shared channel to one DraftWorker, with its `health`."""

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

    async def info(self, timeout: float, wait: bool = True) -> ModelInfo:
        """Returns the worker's model, cached until it fails. Raises TandemError or TokenizerMismatch."""
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
        self._info = None

    def first_message(self, request: Request, prompt_length: int) -> pb.ProposeRequest:
        message = pb.ProposeRequest(tokenizer_sha256=self.tokenizer_sha256, prompt_length=prompt_length)
        proposing_to_wire(request, message)
        return message

    def propose(self, deadline: float | None) -> Any:
        timeout = None if deadline is None else max(0.001, deadline - time.monotonic())
        return self.stub.Propose(timeout=timeout, metadata=outgoing())

    async def close(self) -> None:
        await self.channel.close()


Convert = Callable[[pb.ProposeResponse, float], Draft]
"""Converts a reply and its seconds. Raises InvalidField."""


class RemoteDrafter(Drafter):
    """One proposal session of a request, for a vocabulary of `vocab_size`.

    A call takes at most the client's `seconds` and a share of the request's time. Raises DrafterLate if the share was
    too short to blame the worker, DrafterRefused, or TandemError. `stats` counts bytes and network time; `estimate`
    gets draft and round-trip times.
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
        self._stream: AnsweredStream | None = None
        self._prompt_length = 0

    async def open(self, prompt: Sequence[int]) -> None:
        await self.close()
        self._prompt_length = len(prompt)
        await self._draft(prompt, 0, None, opens=True)

    async def propose(self, tokens: Sequence[int], k: int, model_k: int | None = None) -> Draft:
        return await self._draft(tokens, k, model_k)

    async def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream:
            await stream.close()

    async def _draft(self, tokens: Sequence[int], k: int, model_k: int | None, opens: bool = False) -> Draft:
        # Empty if the sequence is too long for the worker.
        now, seconds = time.monotonic(), self._client.seconds
        if self._request.deadline is not None:
            seconds = max(0.001, min(seconds, _SHARE * (self._request.deadline - now)))
        try:
            limits = await self._client.info(seconds)
            if len(tokens) >= limits.max_sequence_length:
                return Draft()
            k = min(k, limits.max_speculation_length)
            message = pb.ProposeRequest(speculation_length=k)
            if (most := model_part(k, model_k)) < k:
                message.model_speculation_length = most

            def convert(reply: pb.ProposeResponse, took: float) -> Draft:
                return self._converted(reply, took, len(tokens), k, limits.vocab_size, measured=not opens)

            return await self._answered(tokens, message, convert, now + seconds)
        except TandemError as error:
            await self.close()
            if error.outcome in REQUESTS_OWN:
                # A message about an invalid field may quote tokens, and refusals are logged.
                raise DrafterRefused(error.code if error.code == "INVALID_ARGUMENT" else str(error)) from None
            if error.outcome is Outcome.LATE and seconds < min(self._client.seconds, _FAIR_SECONDS):
                raise DrafterLate(str(error)) from None
            self._client.forget()
            raise

    async def _answered(
        self, tokens: Sequence[int], message: pb.ProposeRequest, convert: Convert, give_up: float
    ) -> Draft:
        # A stream lost to an idle lease or a replaced worker is reopened once with all tokens.
        while True:
            again = self._stream is not None
            try:
                return await self._ask(tokens, message, convert, give_up)
            except TandemError as error:
                await self.close()
                ended = error.outcome in (Outcome.GONE, Outcome.FORGOTTEN) and not isinstance(error, BrokenContract)
                if not (again and ended):
                    raise

    async def _ask(self, tokens: Sequence[int], message: pb.ProposeRequest, convert: Convert, give_up: float) -> Draft:
        request = pb.ProposeRequest()
        if self._stream is None:
            self._stream = AnsweredStream(self._client, self._request.deadline, self._stats)
            request = self._client.first_message(self._request, self._prompt_length)
        request.MergeFrom(message)
        answer = self._stream.ask(tokens, request, convert)
        await asyncio.wait((answer,), timeout=max(give_up - time.monotonic(), 0.001))
        if not answer.done():
            raise TandemError("DEADLINE_EXCEEDED", f"{self._client.name} gave no draft in time")
        return answer.result()

    def _converted(
        self, reply: pb.ProposeResponse, took: float, length: int, k: int, vocab_size: int, measured: bool
    ) -> Draft:
        check.count("base_length", reply.base_length, length, length)
        network_seconds = took - check.seconds("server_seconds", reply.server_seconds, took)
        draft = draft_from_wire(reply, vocab_size, self._vocab_size, k, self._request.rule, took)
        if measured:
            self._stats.network_seconds += network_seconds
        if measured and self._estimate:
            self._estimate.drafted(len(draft.token_ids), draft.compute_seconds)
            self._estimate.travelled(network_seconds)
        return draft


class AnsweredStream(Duplex[pb.ProposeRequest, pb.ProposeResponse]):
    what = "the stream of proposals"

    def __init__(self, client: DraftClient, deadline: float | None, stats: SpeculationStats) -> None:
        self._request: pb.ProposeRequest | None = None
        self._answer: asyncio.Future[Draft] | None = None
        self._sent_length, self._sent_at = 0, 0.0
        super().__init__(client.name, client.propose(deadline), stats, lambda: client.seconds)

    def ask(self, tokens: Sequence[int], request: pb.ProposeRequest, convert: Convert) -> asyncio.Future[Draft]:
        """Sends the unsent part of `tokens` with `request`. The future raises TandemError."""
        request.tokens.extend(tokens[self._sent_length :])
        self._answer = answer = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda each: each.cancelled() or each.exception())  # an abandoned one is not logged
        if self.ended:
            answer.set_exception(self.ended)
        self._request, self._convert = request, convert
        self._sent_length, self._sent_at = len(tokens), time.perf_counter()
        self.news.set()
        return answer

    def _next(self) -> pb.ProposeRequest | None:
        request, self._request = self._request, None
        return request

    def _take(self, reply: pb.ProposeResponse) -> None:
        answer, self._answer = self._answer, None
        if answer is None:
            raise InvalidField("reply", "answers no open message")
        try:
            draft = self._convert(reply, time.perf_counter() - self._sent_at)
        except InvalidField:
            self._answer = answer  # ends with the stream
            raise
        if not answer.done():
            answer.set_result(draft)

    def _owed(self) -> float:
        return 0.0  # each call has a time limit of its own

    def _over(self, error: Exception) -> None:
        if self._answer and not self._answer.done():
            self._answer.set_exception(error)
