"""Drafts from a DraftWorker: Drafter waits for each, DraftsElsewhere never; without drafts the target goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from tandem.rpc import wire_checks as check
from tandem.rpc.channel import DRAFT, STUBS, open_channel
from tandem.rpc.client_duplex import ClientDuplex, RoundTrips
from tandem.rpc.credentials import Credentials
from tandem.rpc.generation_client import GenerationClient
from tandem.rpc.received_errors import BrokenContract, TandemError
from tandem.rpc.request_context import outgoing
from tandem.rpc.wire_sessions import draft_from_wire, proposers_from_wire, proposing_to_wire
from tandem.speculation.ahead import DraftingAhead
from tandem.speculation.drafters import Drafter
from tandem.speculation.errors import REQUESTS_OWN, Outcome
from tandem.speculation.estimate import Estimate
from tandem.speculation.fallible import DrafterHealth, DrafterLate, DrafterRefused
from tandem.speculation.retry import Backoff
from tandem.speculation.rules import known_prefix
from tandem.speculation.types import MAX_DRAFTED, Draft, InvalidField, LengthPlan, ModelInfo, Request, SpeculationStats
from tandem.v1 import draft_worker_pb2 as pb

MOST_UNSENT = 32  # tokens
MOST_DRAFTED = 2**14  # between two replies: a worker answers at least every 33rd message


class StreamedDrafts:
    """One request's drafts. A worker silent for the client's `seconds` has failed. `following`: drafts may come."""

    def __init__(self, client: DraftClient, request: Request, vocab_size: int, stats: SpeculationStats) -> None:
        self._client, self._request, self._vocab_size, self._stats = client, request, vocab_size, stats
        self._backoff = Backoff()  # after refusals of this request
        self._news = asyncio.Event()
        self._stream: FollowedStream | None = None
        self.following = True

    def arrived(self) -> None:
        if self._stream:
            self._stream.news.set()
        elif not (self._client.health.up and self._backoff.up):
            self._client.health.skipped(self._stats)
        self._news.set()

    async def run(self, ahead: DraftingAhead, prompt_length: int, ended: Callable[[], None] = lambda: None) -> None:
        """Lets `ahead` adopt drafts until cancelled; calls `ended` when none come for a while."""
        ahead.heard = self.arrived
        while True:
            while not ahead.lookahead.plan.width:  # the worker is asked once its drafts are expected to pay
                await self._news.wait()
                self._news.clear()
            self.following = self._client.health.attempt(self._backoff)
            if self.following:
                await self._follow(ahead, prompt_length, ended)
            else:
                ended()
                await self._news.wait()
                self._news.clear()

    async def _follow(self, ahead: DraftingAhead, prompt_length: int, ended: Callable[[], None]) -> None:
        health = self._client.health
        try:
            limits = await self._client.info(self._client.seconds)
            if len(ahead.known) >= limits.max_sequence_length:
                health.ended()
                self.following = False
                ended()
                await asyncio.Event().wait()  # too long for the worker: it drafts no more

            def take(reply: pb.ProposeResponse, stream: FollowedStream) -> None:
                self._take(reply, stream, ahead, limits.vocab_size)
                self._backoff.succeeded()
                health.succeeded()

            first = self._client.first_message(self._request, prompt_length)
            first.max_total_tokens = ahead.end
            self._stream = FollowedStream(self._client, first, ahead, limits, take, self._stats, self._request.deadline)
            await self._stream.done
        except TandemError as error:
            self._failed(error)
        except Exception as error:  # no error of a drafter may end a request
            health.failed(error)
        finally:
            health.ended()
            stream, self._stream = self._stream, None
            if stream:
                await stream.close()

    def _failed(self, error: TandemError) -> None:
        deadline = self._request.deadline
        if error.outcome in REQUESTS_OWN or (deadline is not None and time.monotonic() >= deadline):
            self._client.health.refused(self._backoff, error.code)
        else:
            self._client.forget()
            self._client.health.failed(error)

    def _take(self, reply: pb.ProposeResponse, stream: FollowedStream, ahead: DraftingAhead, vocab_size: int) -> None:
        stream.check(reply)
        queued = check.seconds("queue_seconds", reply.queue_seconds, stream.seconds)
        computed = check.seconds("compute_seconds", reply.compute_seconds, stream.seconds)
        tokens = check.token_ids("draft_tokens", reply.draft_tokens, vocab_size)
        estimate = ahead.lookahead.estimate
        estimate.drafted(reply.drafted, computed)
        if (rtt := stream.trips.answered(reply.messages_read, reply.server_seconds)) is not None:
            estimate.travelled(rtt)
        self._stats.spent(Draft((), queued, computed))
        ahead.drafted += reply.drafted
        tokens = known_prefix(tokens, self._vocab_size)
        ahead.adopt(reply.base_length, tokens, proposers_from_wire(reply.proposed_by, len(tokens)))


class FollowedStream(ClientDuplex[pb.ProposeRequest, pb.ProposeResponse]):
    """A worker within `limits` follows a sequence. `done`: the stream ended, or the sequence is too long for it."""

    what = "the stream of proposals"

    def __init__(
        self,
        client: DraftClient,
        first: pb.ProposeRequest,
        ahead: DraftingAhead,
        limits: ModelInfo,
        take: Callable[[pb.ProposeResponse, FollowedStream], None],
        stats: SpeculationStats,
        deadline: float | None,
    ) -> None:
        self._request, self._ahead, self._longest, self._taken = first, ahead, limits.max_sequence_length, take
        self.sent_length, self.trips = 0, RoundTrips()
        self._began = time.perf_counter()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        super().__init__(client.name, client.propose(deadline), stats, lambda: client.seconds)
        self.news.set()  # the first message

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def check(self, reply: pb.ProposeResponse) -> None:
        """Checks a reply's message and draft counts. Raises InvalidField."""
        check.count("base_length", reply.base_length, self.sent_length, 1)
        check.count("draft_tokens", len(reply.draft_tokens), MAX_DRAFTED)
        check.count("drafted", reply.drafted, min(MOST_DRAFTED, check.MOST_TOKENS - self._ahead.drafted))
        check.count("messages_read", reply.messages_read, self.trips.sent)
        check.seconds("server_seconds", reply.server_seconds)

    def _next(self) -> pb.ProposeRequest | None:
        known, plan = self._ahead.known, self._ahead.lookahead.plan
        if len(known) >= self._longest:
            self._over()
            return None
        # A worker whose drafts would not pay gets many tokens at once, before its lease ends
        if len(known) - self.sent_length < (1 if plan.width else MOST_UNSENT):
            return None
        request, self._request = self._request, pb.ProposeRequest()
        request.tokens.extend(known[self.sent_length :])
        request.draft_ahead = min(plan.depth, MAX_DRAFTED)
        request.send_first, request.send_more = plan.fresh, plan.width
        self.sent_length = len(known)
        self.trips.sending()
        return request

    def _take(self, reply: pb.ProposeResponse) -> None:
        self._taken(reply, self)

    def _owed(self) -> float:
        return self.trips.owed()

    def _over(self, error: Exception | None = None) -> None:
        if self.done.done():
            return
        if error:
            self.done.set_exception(error)
        else:
            self.done.set_result(None)


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
        self.stub: Any = STUBS[DRAFT](self.channel)
        self.health, self.name = DrafterHealth(f"at {address}"), f"the DraftWorker at {address}"
        self._info: ModelInfo | None = None

    async def info(self, timeout: float, wait: bool = True) -> ModelInfo:
        """Returns the worker's model, cached until it fails. Raises TandemError or TokenizerMismatch."""
        if self._info is None:
            info = await GenerationClient(self.channel, DRAFT).model_info(timeout, wait)
            if difference := self._difference(info):
                raise TokenizerMismatch(f"{difference}; draft and target must share a vocabulary")
            self._info = info
        return self._info

    def _difference(self, info: ModelInfo) -> str:
        ours, theirs = self.tokenizer_sha256, info.tokenizer_sha256
        of = f"of the draft worker at {self.address} ({theirs[:12]})"
        return "" if ours == theirs else f"the tokenizer {of} is not the target's ({ours[:12]})"

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


Convert = Callable[[pb.ProposeResponse, float], Draft]  # of a reply and its seconds; raises InvalidField


class WaitingDrafter(Drafter):
    """One proposal session of a request. Raises DrafterLate, DrafterRefused, TandemError.

    DrafterLate: the call's share of the request's time was too short to blame the worker.
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
        await self.propose(prompt, LengthPlan(0, 0), opens=True)

    async def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream:
            await stream.close()

    async def propose(self, tokens: Sequence[int], plan: LengthPlan, opens: bool = False) -> Draft:
        """Returns a draft, empty if the sequence is too long for the worker."""
        now, seconds = time.monotonic(), self._client.seconds
        if self._request.deadline is not None:
            seconds = max(0.001, min(seconds, _SHARE * (self._request.deadline - now)))
        try:
            limits = await self._client.info(seconds)
            if len(tokens) >= limits.max_sequence_length:
                return Draft()
            k = min(plan.k, limits.max_speculation_length)
            message = pb.ProposeRequest(speculation_length=k, least_probability=plan.least)
            if plan.model_k < k:
                message.model_speculation_length = plan.model_k

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


class AnsweredStream(ClientDuplex[pb.ProposeRequest, pb.ProposeResponse]):
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
