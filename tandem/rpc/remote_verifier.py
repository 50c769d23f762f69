"""Implements speculation's Verifier over the RPCs OpenSession, Verify and CloseSession.

A lost session (connection, server or lease) is reopened with all committed tokens at whichever verifier answers first:
the output is the same, and no committed token is generated twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Collection, Coroutine, Sequence
from functools import partial
from typing import Any

from tandem.rpc import calls, wire
from tandem.rpc.answer_times import Waits
from tandem.rpc.endpoint_pool import CHECK_SECONDS, LOST, RetryBudget
from tandem.rpc.errors import TandemError
from tandem.rpc.liveness import answered, watch
from tandem.rpc.race import Race
from tandem.rpc.request_context import outgoing
from tandem.rpc.verifier_client import VerifierClient, VerifierEndpoint
from tandem.rpc.wire_features import feature_request
from tandem.speculation.extent import WHOLE, Extent
from tandem.speculation.features import FeatureInbox
from tandem.speculation.pipeline import ATTEMPTS, Answer
from tandem.speculation.types import InvalidField, Rule, SamplingParams, SparseDistribution, SpeculationStats, Verdict
from tandem.v1 import target_verifier_pb2 as pb

log = logging.getLogger("tandem.verifier")

_RETRY_SECONDS = 0.2  # when a full server does not say when to retry


class RemoteVerifier:
    """One session of a TargetVerifier, for one request. Counts bytes and network time into `stats`.

    `deadline` (monotonic seconds) is the request's: no call or retry continues beyond it. `inbox`: asks for features
    and gets them; a verifier that hands out none is met with none. `extent`: how long the sequence may become, which is
    what the target reserves memory for.
    """

    def __init__(
        self,
        client: VerifierClient,
        stats: SpeculationStats,
        margins: bool = False,
        rule: Rule = Rule.AGREEMENT,
        deadline: float | None = None,
        logprobs: int | None = None,
        adapter: str = "",
        inbox: FeatureInbox | None = None,
        extent: Extent = WHOLE,
    ) -> None:
        self._inbox, self._extent = inbox, extent
        self.client, self._stats, self._margins, self._rule = client, stats, margins, rule
        self._logprobs, self._adapter = logprobs, adapter
        self._adapter_revision = ""  # of the first verifier that opened the session: others must have the same
        self.endpoint = client.endpoint
        self.retry_budget = RetryBudget(client.persistence, deadline, admission=client.deadlines.admission)
        self.waits = Waits(client.deadlines.silence, client.deadlines.stall, self.retry_budget, client.times)
        self._next = self.endpoint.address  # the address to try first at the next opening
        self._session_ids: dict[VerifierEndpoint, str] = {}  # of every endpoint where the session may be open
        self._prompt_length = 0
        self._sampling = SamplingParams()
        self._steps_read: dict[str, int] = {}  # of sessions that ran without waiting
        self.opening_rtt = 0.0
        """Seconds of the last opening that were not spent on the prompt: about a round trip."""
        self.max_unread = 0
        """Tokens that a run of the open session may be ahead of those acknowledged; 0: the server does not run it."""

    async def open(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        """Opens the session, unless it is open already."""
        if not self._session_ids:
            self._prompt_length, self._sampling = len(prompt), sampling
            self._stats.cached_prompt_tokens = (await self._open(prompt)).reused_length

    async def _open(self, prefix: Sequence[int]) -> pb.OpenSessionResponse:
        """Opens the session with all committed tokens, at the verifier that answers first. Raises TandemError."""
        self._next = self.client.pool.current
        self.retry_budget.opening()
        race = Race[VerifierEndpoint, pb.OpenSessionResponse](
            lambda endpoint: self._open_at(endpoint, prefix, race.in_progress),
            self._following,
            lambda endpoint, error: self._pause_after(endpoint, error, prefix),
            lambda: self.waits.opening(len(prefix)),
        )
        self.endpoint, reply = await race.first()
        self.client.pool.answered(self.endpoint.address)
        for other in [endpoint for endpoint in self._session_ids if endpoint is not self.endpoint]:
            self._end_at(other, self._session_ids.pop(other))
        self.max_unread = reply.max_unread_tokens
        self._check_rule(reply.rule)
        self._check_processing(reply.processed_fields)
        if self._adapter and not reply.adapter_revision:
            raise self._does_not("adapter", "apply it")
        self._adapter_revision = reply.adapter_revision
        if self._inbox and not reply.HasField("features"):
            self._inbox.handed_out = False  # an older verifier, or one that was not asked to: no head drafts there
        elif self._inbox:
            self._keep_features(self._inbox.opened, reply.features.start, reply.features.values)
        return reply

    def _following(self, exclude: Collection[VerifierEndpoint]) -> VerifierEndpoint | None:
        address = self.client.pool.following(self._next, [endpoint.address for endpoint in exclude])
        return None if address is None else self.client.endpoints[address]

    async def _open_at(
        self, endpoint: VerifierEndpoint, prefix: Sequence[int], others: Sequence[VerifierEndpoint]
    ) -> pb.OpenSessionResponse:
        """Opens the session at `endpoint`, while `others` have not answered. Raises TandemError."""
        if others:
            slow = ", ".join(other.address for other in others)
            log.info("%s is slow to open a session: trying %s too", slow, endpoint.address)
        is_only = self.client.is_only(endpoint)
        await self.client.check(endpoint, self.retry_budget.limited(CHECK_SECONDS if is_only else self.waits.silence()))
        request = self._opening(self._session_ids.setdefault(endpoint, uuid.uuid4().hex), prefix)
        sent = time.monotonic()
        call = self._call(endpoint, "OpenSession", request, self.retry_budget.limited(self.client.deadlines.open))
        reply: pb.OpenSessionResponse = await self._watched(endpoint, "OpenSession", call)
        seconds = time.monotonic() - sent
        self.client.times.opened(reply.committed_length - reply.reused_length, seconds)
        self.opening_rtt = max(0.0, seconds - reply.queue_seconds - reply.prefill_seconds)
        return reply

    async def _watched(
        self,
        endpoint: VerifierEndpoint,
        what: str,
        call: Coroutine[Any, Any, Any],
        stall: Callable[[], float] | None = None,
    ) -> Any:
        """Returns the reply to a call; gives a hung verifier up if there is another. Raises TandemError."""
        if self.client.is_only(endpoint):
            return await call
        sent = time.monotonic()
        watching = partial(watch, what, endpoint.health, lambda: time.monotonic() - sent, self.waits.silence, stall)
        return await answered(call, self.waits.silence() / 2, watching)

    def _opening(self, session_id: str, prefix: Sequence[int]) -> pb.OpenSessionRequest:
        expected = self.client.expected
        return pb.OpenSessionRequest(
            session_id=session_id,
            prefix=prefix,
            prompt_length=self._prompt_length,
            sampling=wire.sampling_to_wire(self._sampling),
            rule=wire.rule_to_wire(self._rule),
            tokenizer_sha256=self.client.tokenizer_sha256,
            weights_revision=expected.weights_revision if expected else "",
            dtype=expected.dtype if expected else "",
            vocab_size=expected.vocab_size if expected else 0,
            adapter=self._adapter,
            adapter_revision=self._adapter_revision,
            features=feature_request(self._inbox, len(prefix)),
            max_total_tokens=self._extent.tokens(self._prompt_length),
        )

    def _pause_after(self, endpoint: VerifierEndpoint, error: TandemError, prefix: Sequence[int]) -> float:
        """Selects the next endpoint after a failed OpenSession and returns the seconds to wait. Raises TandemError."""
        pool = self.client.pool
        if error.code == "RESOURCE_EXHAUSTED":
            wait = self.retry_budget.full(error.retry_seconds or _RETRY_SECONDS)
            if wait is None:
                raise error
            self._next = pool.after(endpoint.address)
            return wait
        if error.code == "FAILED_PRECONDITION" and pool.refuse(endpoint.address, error.message):
            self._next = pool.current
            return 0.0
        wait = self._lost(endpoint, error, prefix)
        self._next = pool.current
        return wait

    def _lost(self, endpoint: VerifierEndpoint, error: TandemError, tokens: Sequence[int]) -> float:
        """Returns the seconds to wait before the session is reopened. Raises the error if reopening cannot help."""
        error.produced = tuple(tokens[self._prompt_length :])
        if error.code not in LOST:
            raise error
        if not self.retry_budget.over:
            endpoint.suspect = True
            if error.code != "NOT_FOUND":
                self.client.pool.failed(endpoint.address, str(error))
        wait = self.retry_budget.wait()
        if wait is None:
            tried = f"{self.retry_budget.attempts} attempts in {self.retry_budget.seconds:.1f} s at {self.client.pool}"
            raise TandemError(
                error.code, f"{error.message} (given up after {tried})", reason=error.reason, produced=error.produced
            )
        return wait

    def _check_rule(self, replied: int) -> None:
        """Checks the rule that the server reports. Servers older than the rules report none and use agreement."""
        if replied != wire.rule_to_wire(self._rule) and (replied or self._rule is not Rule.AGREEMENT):
            raise TandemError(
                "FAILED_PRECONDITION",
                f"rule: the TargetVerifier at {self.endpoint.address} does not verify by {self._rule.value}, as "
                f"requested; it reports {wire.rule_name(replied)}",
            )

    def _check_processing(self, replied: Collection[str]) -> None:
        """Checks that the server applies what the request asks for: an older one would silently leave it out."""
        for name in self._sampling.processed:
            if name not in replied:
                raise self._does_not(name, "apply it")

    def _does_not(self, field: str, what: str) -> TandemError:
        message = f"{field}: the TargetVerifier at {self.endpoint.address} does not {what}; it is an older version"
        return TandemError("FAILED_PRECONDITION", message)

    def answer(self, reply: pb.VerifyResponse, seconds: float) -> Answer:
        """Converts the reply to a round that took `seconds`. Raises TandemError if it lacks what was asked for."""
        self.check_reported(reply)
        self.take_features(reply)
        return wire.answer_from_wire(reply, seconds)

    def check_reported(self, reply: pb.VerifyResponse) -> None:
        """Raises TandemError if the reply lacks log-probabilities that were asked for."""
        if self._logprobs is not None and not reply.stale and len(reply.logprobs) != len(reply.token_ids):
            raise self._does_not("logprobs", "report them")

    def take_features(self, reply: pb.VerifyResponse) -> None:
        """Passes on the features of a verdict, and counts their bytes. Raises TandemError."""
        if self._inbox and reply.features:
            self._keep_features(self._inbox.came, reply.committed_length - len(reply.token_ids) - 1, reply.features)

    def _keep_features(self, keep: Callable[[int, bytes], None], start: int, values: bytes) -> None:
        self._stats.feature_bytes += len(values)
        try:
            keep(start, values)
        except InvalidField as error:
            message = f"the TargetVerifier at {self.endpoint.address}: {error}"
            raise TandemError("FAILED_PRECONDITION", message) from None

    def count_step(self) -> None:
        """Counts a step of a run that was read."""
        name = self._session_ids.get(self.endpoint, "")
        self._steps_read[name] = self._steps_read.get(name, 0) + 1

    async def verify(
        self, tokens: Sequence[int], draft: Sequence[int], distributions: Sequence[SparseDistribution] = ()
    ) -> Verdict:
        stale = 0
        while True:
            try:
                answer = await self.ask(self.request(len(tokens), tokens[-1], draft, distributions))
            except TandemError as error:
                await self.reopen(tokens, error)
                continue
            self._stats.network_seconds += answer.network_seconds
            if answer.verdict is not None:
                self.retry_budget.progress()
                return answer.verdict
            stale += 1
            message = f"round at {len(tokens)} is stale: the verifier holds {answer.committed_length} tokens"
            if stale == ATTEMPTS:
                raise TandemError("ABORTED", message, produced=tuple(tokens[self._prompt_length :]))
            await self.refresh(tokens)

    def request(
        self,
        base_length: int,
        last_token: int,
        draft: Sequence[int],
        distributions: Sequence[SparseDistribution] = (),
    ) -> pb.VerifyRequest:
        """Builds the request for one round of this session."""
        return pb.VerifyRequest(
            session_id=self._session_ids.get(self.endpoint, ""),
            base_length=base_length,
            last_token=last_token,
            draft_tokens=draft,
            report_margins=self._margins,
            logprobs=self._logprobs,
            distributions=wire.distributions_to_wire(distributions),
        )

    async def ask(self, request: pb.VerifyRequest) -> Answer:
        """Runs one round as a unary call. Raises TandemError."""
        sent = time.perf_counter()
        call = self._call(self.endpoint, "Verify", request, self.retry_budget.limited(self.client.deadlines.verify))
        reply = await self._watched(self.endpoint, "a round", call, self.waits.round)
        seconds = time.perf_counter() - sent
        self.client.times.answered(seconds)
        return self.answer(reply, seconds)

    async def reopen(self, tokens: Sequence[int], cause: TandemError) -> None:
        """Reopens the session with all committed tokens after `cause`. Raises TandemError, possibly `cause` itself."""
        await asyncio.sleep(self._lost(self.endpoint, cause, tokens))
        await self._open(tokens)

    async def refresh(self, tokens: Sequence[int]) -> None:
        """Reopens a live session that holds other tokens than `tokens`."""
        await self._open(tokens)

    async def close(self, wait: bool = True) -> None:
        """Closes the session. If cancelled or failed, the client retries in the background; at last the lease ends.

        Without `wait`, the answer is not waited for.
        """
        session_ids, self._session_ids = self._session_ids, {}
        closing = [self._end_at(*each) for each in session_ids.items()]
        if closing and wait:
            await asyncio.wait(closing)

    def _end_at(self, endpoint: VerifierEndpoint, session_id: str) -> asyncio.Future[None]:
        """Starts closing the session at `endpoint`, where it may be open; its id is never used again."""
        request, seconds = pb.CloseSessionRequest(session_id=session_id), self.client.deadlines.close

        async def close() -> None:
            reply = await self._call(endpoint, "CloseSession", request, seconds)
            if session_id in self._steps_read:
                self._stats.wasted_steps += max(0, reply.steps - self._steps_read.pop(session_id))

        return self.client.closes.begin(close)

    async def _call(self, endpoint: VerifierEndpoint, method: str, request: Any, timeout: float) -> Any:
        call = getattr(endpoint.stub, method)
        return await calls.unary(call, request, self._stats, timeout=timeout, metadata=outgoing())
