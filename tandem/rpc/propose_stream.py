"""Implements DraftsElsewhere over Propose without waiting; without drafts the target decodes plainly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from tandem.rpc import wire_checks as check
from tandem.rpc.duplex import Duplex, RoundTrips
from tandem.rpc.errors import TandemError
from tandem.rpc.remote_drafter import DraftClient
from tandem.rpc.wire_sessions import proposers_from_wire
from tandem.speculation.ahead import GivenPlan
from tandem.speculation.errors import REQUESTS_OWN
from tandem.speculation.fallible import Attempt
from tandem.speculation.lookahead import LookaheadPolicy
from tandem.speculation.retry import Backoff
from tandem.speculation.rules import known_prefix
from tandem.speculation.types import MAX_DRAFTED, Draft, ModelInfo, Proposer, Request, SpeculationStats
from tandem.v1 import draft_worker_pb2 as pb

MOST_DRAFTED = 2**14  # between two replies: a worker answers at least every 33rd message


class AdoptsDrafts(Protocol):
    """A sequence of at most `end` tokens with remote drafts; see DraftingAhead."""

    known: list[int]
    end: int
    drafted: int
    heard: Callable[[], None] | None

    @property
    def lookahead(self) -> LookaheadPolicy | GivenPlan: ...

    def adopt(self, base: int, token_ids: Sequence[int], proposed_by: Sequence[Proposer] = ()) -> None: ...


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

    async def run(self, ahead: AdoptsDrafts, prompt_length: int, ended: Callable[[], None] = lambda: None) -> None:
        """Lets `ahead` adopt drafts until cancelled; calls `ended` when none come for a while."""
        ahead.heard = self.arrived
        while True:
            attempt = self._client.health.attempt(self._backoff)
            self.following = attempt is not None
            if attempt:
                await self._follow(attempt, ahead, prompt_length, ended)
            else:
                ended()
                await self._news.wait()
                self._news.clear()

    async def _follow(
        self, attempt: Attempt, ahead: AdoptsDrafts, prompt_length: int, ended: Callable[[], None]
    ) -> None:
        try:
            limits = await self._client.info(self._client.seconds)
            if len(ahead.known) >= limits.max_sequence_length:
                attempt.ended()
                self.following = False
                ended()
                await asyncio.Event().wait()  # too long for the worker: it drafts no more

            def take(reply: pb.ProposeResponse, stream: FollowedStream) -> None:
                self._take(reply, stream, ahead, limits.vocab_size)
                self._backoff.succeeded()
                attempt.succeeded()

            first = self._client.first_message(self._request, prompt_length)
            first.max_total_tokens = ahead.end
            self._stream = FollowedStream(self._client, first, ahead, limits, take, self._stats, self._request.deadline)
            await self._stream.done
        except TandemError as error:
            self._failed(attempt, error)
        except Exception as error:  # no error of a drafter may end a request
            attempt.failed(error)
        finally:
            attempt.ended()
            stream, self._stream = self._stream, None
            if stream:
                await stream.close()

    def _failed(self, attempt: Attempt, error: TandemError) -> None:
        deadline = self._request.deadline
        if error.outcome in REQUESTS_OWN or (deadline is not None and time.monotonic() >= deadline):
            attempt.refused(self._backoff, error.code)
        else:
            self._client.forget()
            attempt.failed(error)

    def _take(self, reply: pb.ProposeResponse, stream: FollowedStream, ahead: AdoptsDrafts, vocab_size: int) -> None:
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


class FollowedStream(Duplex[pb.ProposeRequest, pb.ProposeResponse]):
    """A worker within `limits` follows a sequence. `done`: the stream ended, or the sequence is too long for it."""

    what = "the stream of proposals"

    def __init__(
        self,
        client: DraftClient,
        first: pb.ProposeRequest,
        ahead: AdoptsDrafts,
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
        if len(known) <= self.sent_length:
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
