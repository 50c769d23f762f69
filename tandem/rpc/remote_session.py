"""A session of a TargetVerifier, reopened when lost with its tokens at the first verifier to answer: same output."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from tandem.rpc import wire_checks as check
from tandem.rpc.channel import unary
from tandem.rpc.endpoint_pool import CHECK_SECONDS
from tandem.rpc.received_errors import BrokenContract, TandemError, contract
from tandem.rpc.request_context import outgoing
from tandem.rpc.verifier_client import VerifierClient, VerifierEndpoint
from tandem.rpc.wire_sessions import check_applied, check_opened, distributions_to_wire, opening_to_wire
from tandem.speculation.errors import LOST, Outcome
from tandem.speculation.features import FeatureInbox
from tandem.speculation.retry import RetryBudget
from tandem.speculation.types import InvalidField, Request, Rule, SparseDistribution, SpeculationStats
from tandem.v1 import target_verifier_pb2 as pb

log = logging.getLogger("tandem.verifier")

PROMPT_TOKEN_SECONDS = 0.005  # added per prompt token to the time of opening a session
_SHARE = 0.25  # of the time until the deadline, that one verifier may take if there is another


class RemoteSession:
    """No call or retry outlasts the request's deadline. `inbox` receives features."""

    def __init__(
        self, client: VerifierClient, request: Request, stats: SpeculationStats, inbox: FeatureInbox | None = None
    ) -> None:
        self.client, self._stats, self._inbox = client, stats, inbox
        self.wanted = replace(request, features=inbox.spec if inbox else None)  # without features if there are none
        self._adapter_revision = ""  # of the first verifier that opened the session: others must have the same
        self.endpoint = client.endpoint
        self.retry_budget = RetryBudget(client.retry_seconds, request.deadline, admission=client.deadlines.admission)
        self._next = self.endpoint.address  # the address to try first at the next opening
        self._session_ids: dict[VerifierEndpoint, str] = {}  # of every endpoint where the session may be open
        self._prompt_length = 0
        self._refreshed: tuple[VerifierEndpoint, int] | None = None  # where, and with how many tokens
        self._steps_read: dict[str, int] = {}  # of sessions that ran without waiting
        self.metadata = outgoing()  # of the request's streams, which are longer than the span that begins them
        self.opening_rtt = 0.0  # seconds beside the prompt's: about a round trip
        self.max_unread = 0 if inbox or request.rule is not Rule.AGREEMENT else self.endpoint.max_unread
        """Tokens that a run may be ahead of those acknowledged; 0: no runs yet."""
        self.opened_at, self.run_follows = 0.0, False  # perf_counter; 0: never, though a run may have begun

    async def open(self, prompt: Sequence[int]) -> None:
        if not self.opened_at:
            self._prompt_length = len(prompt)
            self._stats.cached_prompt_tokens = (await self._open(prompt)).reused_length

    async def _open(self, prefix: Sequence[int]) -> pb.OpenSessionResponse:
        self._next = self.client.pool.current
        self.retry_budget.opening()
        self.endpoint, reply = await self._first(prefix)
        self.client.pool.answered(self.endpoint.address)
        for other in [endpoint for endpoint in self._session_ids if endpoint is not self.endpoint]:
            self._end_at(other, self._session_ids.pop(other))
        self.max_unread = reply.max_unread_tokens
        self._adapter_revision = reply.adapter_revision
        self._stats.verifiers.append((*self.endpoint.signs, reply.adapter_revision))
        if self._inbox and not reply.HasField("features"):
            self._inbox.handed_out = False  # the verifier hands none out: no head drafts there
            self.wanted = replace(self.wanted, features=None)
        elif self._inbox:
            self._stats.feature_bytes += len(reply.features.values)
            self._inbox.opened(reply.features.start, reply.features.values)
            self.wanted = replace(self.wanted, features=self._inbox.spec)  # an earlier verifier may have had none
        self.opened_at = time.perf_counter()
        return reply

    async def _first(self, prefix: Sequence[int]) -> tuple[VerifierEndpoint, pb.OpenSessionResponse]:
        """Returns the first verifier to open the session; beside a slow one another is tried. Raises TandemError."""
        calls: dict[asyncio.Task[pb.OpenSessionResponse], VerifierEndpoint] = {}
        due = time.monotonic()
        try:
            while True:
                endpoint, left = self._following(calls.values()), due - time.monotonic()
                if endpoint is not None and left <= 0:
                    opening = self._open_at(endpoint, prefix, list(calls.values()))
                    calls[asyncio.create_task(opening, name="open")] = endpoint
                    due = time.monotonic() + self._before_another(len(prefix) * PROMPT_TOKEN_SECONDS)
                elif calls:
                    timeout = None if endpoint is None or left == math.inf else left
                    done, _ = await asyncio.wait(calls, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        if not task.exception():
                            return calls.pop(task), task.result()
                    for task in done:
                        failed = calls.pop(task)
                        due = time.monotonic() + self._pause_after(failed, task.exception(), prefix, bool(calls))
                else:
                    await asyncio.sleep(left)
        finally:
            for task in calls:
                task.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    def _pause_after(
        self, endpoint: VerifierEndpoint, error: BaseException | None, prefix: Sequence[int], pending: bool
    ) -> float:
        """Returns the seconds until the next attempt. While calls are pending, only the request's own error ends it."""
        if not isinstance(error, TandemError):
            assert error is not None
            raise error
        try:
            return self._pause(endpoint, error, prefix)
        except TandemError as final:
            if pending and final.outcome in LOST | {Outcome.FULL}:
                return math.inf
            raise

    def _following(self, exclude: Collection[VerifierEndpoint]) -> VerifierEndpoint | None:
        address = self.client.pool.following(self._next, [endpoint.address for endpoint in exclude])
        return None if address is None else self.client.endpoints[address]

    async def _open_at(
        self, endpoint: VerifierEndpoint, prefix: Sequence[int], others: Sequence[VerifierEndpoint]
    ) -> pb.OpenSessionResponse:
        if others:
            slow = ", ".join(other.address for other in others)
            log.info("%s is slow to open a session: trying %s too", slow, endpoint.address)
        only = self.client.is_only(endpoint)
        seconds = self.retry_budget.limited(CHECK_SECONDS) if only else self._before_another()
        await self.client.check(endpoint, seconds)
        request, sent = self._opening(endpoint, prefix), time.perf_counter()
        seconds = self.retry_budget.limited(self.client.deadlines.open)
        reply = await self._call(endpoint, "OpenSession", request, seconds)
        took = time.perf_counter() - sent
        with contract(endpoint.name):
            check_opened(request, reply, self.client.expected, self._inbox.spec if self._inbox else None)
        check_applied(endpoint.name, self.wanted, reply)
        self.opening_rtt = max(0.0, took - reply.queue_seconds - reply.prefill_seconds)
        return reply

    def patience(self, endpoint: VerifierEndpoint) -> float:
        """Returns the seconds that `endpoint` may take for a round; less if another verifier can take over."""
        most = self.retry_budget.limited(self.client.deadlines.verify)
        return most if self.client.is_only(endpoint) else min(most, self._before_another())

    def _before_another(self, more: float = 0.0) -> float:
        return self.retry_budget.before_another(self.client.deadlines.stall + more, _SHARE)

    def _opening(self, endpoint: VerifierEndpoint, prefix: Sequence[int]) -> pb.OpenSessionRequest:
        request = opening_to_wire(self.wanted, prefix, self._prompt_length, self._inbox, self.client.expected)
        request.session_id = self._session_ids.setdefault(endpoint, uuid.uuid4().hex)
        request.tokenizer_sha256, request.adapter_revision = self.client.tokenizer_sha256, self._adapter_revision
        request.run_follows = self.run_follows
        return request

    def _pause(self, endpoint: VerifierEndpoint, error: TandemError, prefix: Sequence[int]) -> float:
        pool = self.client.pool
        if error.outcome is Outcome.FULL:
            wait = self.retry_budget.full(error.retry_seconds)
            if wait is None:
                raise error
            self._next = pool.after(endpoint.address)
            return wait
        if error.outcome is Outcome.UNFIT and pool.refuse(endpoint.address, error.message):
            self._next = pool.current
            return 0.0
        wait = self._lost(endpoint, error, prefix)
        self._next = pool.current
        return wait

    def _lost(self, endpoint: VerifierEndpoint, error: TandemError, tokens: Sequence[int]) -> float:
        error.produced = self.produced(tokens)
        if error.outcome not in LOST or (isinstance(error, BrokenContract) and self.client.is_only(endpoint)):
            raise error
        if not self.retry_budget.over:
            endpoint.suspect = True
            if error.outcome is not Outcome.FORGOTTEN:
                self.client.pool.failed(endpoint.address, str(error))
        wait = self.retry_budget.wait()
        if wait is None:
            tried = f"{self.retry_budget.attempts} attempts in {self.retry_budget.seconds:.1f} s at {self.client.pool}"
            raise TandemError(
                error.code, f"{error.message} (given up after {tried})", reason=error.reason, produced=error.produced
            )
        return wait

    def take_features(self, reply: pb.VerifyResponse) -> None:
        if self._inbox and reply.features:
            self._stats.feature_bytes += len(reply.features)
            self._inbox.came(reply.committed_length - len(reply.token_ids) - 1, reply.features)

    def count_step(self) -> None:
        name = self._session_ids.get(self.endpoint, "")
        self._steps_read[name] = self._steps_read.get(name, 0) + 1

    def produced(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Returns the output tokens: `tokens` without the prompt."""
        return tuple(tokens[self._prompt_length :])

    def request(
        self, base_length: int, last_token: int, draft: Sequence[int], distributions: Sequence[SparseDistribution] = ()
    ) -> pb.VerifyRequest:
        return pb.VerifyRequest(
            session_id=self._session_ids.setdefault(self.endpoint, uuid.uuid4().hex),
            base_length=base_length,
            last_token=last_token,
            draft_tokens=draft,
            distributions=distributions_to_wire(distributions) if distributions else (),
        )

    async def resume(self, tokens: Sequence[int], cause: Exception | None = None) -> None:
        if not isinstance(cause, TandemError):
            again = (self.endpoint, len(tokens))
            if again == self._refreshed and not self.client.is_only(self.endpoint):
                error = InvalidField("committed_length", "its session still holds other tokens than it was opened with")
                cause = BrokenContract(self.endpoint.name, error)
            self._refreshed = again
        if isinstance(cause, TandemError):
            await asyncio.sleep(self._lost(self.endpoint, cause, tokens))
        await self._open(tokens)

    async def close(self, wait: bool = True) -> None:
        """Closes the session, retrying in the background; without `wait` returns at once."""
        session_ids, self._session_ids, self.opened_at = self._session_ids, {}, 0.0
        closing = [self._end_at(*each) for each in session_ids.items()]
        if closing and wait:
            await asyncio.wait(closing)

    def _end_at(self, endpoint: VerifierEndpoint, session_id: str) -> asyncio.Future[None]:
        # The id is never used again.
        request, seconds = pb.CloseSessionRequest(session_id=session_id), self.client.deadlines.close

        async def close() -> None:
            reply = await self._call(endpoint, "CloseSession", request, seconds)
            if session_id in self._steps_read:
                unread = reply.steps - self._steps_read.pop(session_id)
                self._stats.wasted_steps += min(max(0, unread), check.MOST_TOKENS)

        return self.client.closes.begin(close)

    async def _call(self, endpoint: VerifierEndpoint, method: str, request: Any, timeout: float) -> Any:
        call = getattr(endpoint.stub, method)
        return await unary(call, request, self._stats, timeout=timeout, metadata=outgoing())
