"""The target a network away: speculation's Verifier over OpenSession, Verify and CloseSession.

A session that is lost (its connection, its server, its lease) is opened again with all that is committed, at whichever
verifier answers: the tokens are the same, and none is asked for twice.
"""

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
from clients.failover import CHECK_SECONDS, LOST, Patience, Persistence, Roster, addresses_of, disagreement
from clients.generation import GenerationClient
from clients.request_context import outgoing
from speculation.pipeline import ATTEMPTS, Answer
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


class Peer:
    """A channel to one TargetVerifier.

    `streams`: whether it knows VerifyStream; None: not tried yet. `suspect`: whoever answers there next may be another
    server than before, and is asked what it runs.
    """

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        self.address = address
        self.streams: bool | None = None
        self.suspect = True
        self.channel = open_channel(address, credentials)
        self.stub: Any = stub(self.channel, TARGET)

    async def info(self, seconds: float) -> ModelInfo:
        """What it runs, if it answers now. Raises TandemError."""
        try:
            reply = await self.stub.GetModelInfo(pb.TargetVerifierGetModelInfoRequest(), timeout=seconds)
        except grpc.RpcError as error:
            raise from_rpc(error) from None
        return wire.info_from_wire(reply.model)


class VerifierClient:
    """Channels to the TargetVerifiers at "HOST:PORT[,HOST:PORT...]", shared by the requests of a process.

    All but the first that answered must run what that one runs (`expected`). Raises ValueError.
    """

    def __init__(
        self,
        addresses: str,
        tokenizer_sha256: str,
        deadlines: Deadlines | None = None,
        persistence: Persistence | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        self.tokenizer_sha256 = tokenizer_sha256
        self.deadlines, self.persistence = deadlines or Deadlines(), persistence or Persistence()
        self.roster = Roster(addresses_of(addresses))
        self.peers = {address: Peer(address, credentials) for address in self.roster.addresses}
        self.expected: ModelInfo | None = None

    @property
    def address(self) -> str:
        """Of the verifier that is asked now."""
        return self.roster.current

    @property
    def peer(self) -> Peer:
        return self.peers[self.roster.current]

    async def model_info(self, timeout: float = 30.0) -> ModelInfo:
        """What the first verifier to answer runs; waits up to `timeout` seconds for one. Raises TandemError."""
        asking = {
            asyncio.create_task(GenerationClient(peer.channel, TARGET).model_info(timeout)): peer
            for peer in self.peers.values()
        }
        try:
            while not (answered := [task for task in asking if task.done() and not task.exception()]):
                pending = [task for task in asking if not task.done()]
                if not pending:
                    error = next(iter(asking)).exception()
                    assert isinstance(error, TandemError)
                    raise TandemError(error.code, f"no TargetVerifier at {self.roster}: {error.message}")
                await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        peer = asking[answered[0]]
        peer.suspect, self.roster.current = False, peer.address
        self.expected = answered[0].result()
        return self.expected

    async def check(self, peer: Peer, seconds: float) -> None:
        """Whether sessions may go on there. Raises TandemError: FAILED_PRECONDITION where it runs something else."""
        if self.expected is None or not peer.suspect:
            return
        found = disagreement(self.expected, await peer.info(min(seconds, CHECK_SECONDS)))
        if found:
            raise TandemError("FAILED_PRECONDITION", f"the TargetVerifier at {peer.address}: {found}")
        peer.suspect = False

    async def close(self) -> None:
        await asyncio.gather(*(peer.channel.close() for peer in self.peers.values()))


class RemoteVerifier:
    """One session of a TargetVerifier, for one request. Counts bytes and network time into `stats`.

    `deadline` (monotonic seconds) is the request's: no call, and no trying again, goes on beyond it.
    """

    def __init__(
        self,
        client: VerifierClient,
        stats: SpeculationStats,
        margins: bool = False,
        rule: Rule = Rule.AGREEMENT,
        deadline: float | None = None,
    ) -> None:
        self.client, self._stats, self._margins, self._rule = client, stats, margins, rule
        self.peer = client.peer
        self.patience = Patience(client.persistence, deadline)
        self._session_id = ""
        self._prompt_length = 0
        self._sampling = SamplingParams()

    async def open(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        self._session_id = uuid.uuid4().hex
        self._prompt_length, self._sampling = len(prompt), sampling
        await self._open(prompt)

    async def _open(self, prefix: Sequence[int]) -> None:
        """Opens the session with all that is committed, wherever it can be. Raises TandemError."""
        request = self._opening(prefix)
        self.peer = self.client.peer
        admission = time.monotonic() + self.client.deadlines.admission
        while True:
            try:
                await self.client.check(self.peer, self.patience.limited(CHECK_SECONDS))
                seconds = self.patience.limited(self.client.deadlines.open)
                reply = await self._call(self.peer.stub.OpenSession, request, seconds)
            except TandemError as error:
                await asyncio.sleep(self._pause_after(error, admission, prefix))
                continue
            self.client.roster.answered(self.peer.address)
            return self._check_rule(reply.rule)

    def _opening(self, prefix: Sequence[int]) -> pb.OpenSessionRequest:
        expected = self.client.expected
        return pb.OpenSessionRequest(
            session_id=self._session_id,
            prefix=prefix,
            prompt_length=self._prompt_length,
            sampling=wire.sampling_to_wire(self._sampling),
            rule=wire.rule_to_wire(self._rule),
            tokenizer_sha256=self.client.tokenizer_sha256,
            weights_revision=expected.weights_revision if expected else "",
            dtype=expected.dtype if expected else "",
            vocab_size=expected.vocab_size if expected else 0,
        )

    def _pause_after(self, error: TandemError, admission: float, prefix: Sequence[int]) -> float:
        """What to do about an OpenSession that failed: who is asked next, and after how many seconds. Or raises."""
        roster = self.client.roster
        if error.code == "RESOURCE_EXHAUSTED":
            self.patience.progress()  # it answers
            wait = self.patience.limited(error.retry_seconds or _RETRY_SECONDS)
            if time.monotonic() + wait > admission:
                raise error
            self.peer = self.client.peers[roster.after(self.peer.address)]
            return wait
        if error.code == "FAILED_PRECONDITION" and roster.refuse(self.peer.address, error.message):
            self.peer = self.client.peer
            return 0.0
        wait = self._lost(error, prefix)
        self.peer = self.client.peer
        return wait

    def _lost(self, error: TandemError, tokens: Sequence[int]) -> float:
        """Seconds to wait before the session is opened again. Raises the error where that is of no use any more."""
        error.produced = tuple(tokens[self._prompt_length :])
        if error.code not in LOST:
            raise error
        if not self.patience.over:
            self.peer.suspect = True
            if error.code != "NOT_FOUND":
                self.client.roster.failed(self.peer.address, str(error))
        wait = self.patience.wait()
        if wait is None:
            tried = f"{self.patience.attempts} attempts in {self.patience.seconds:.1f} s at {self.client.roster}"
            raise TandemError(
                error.code, f"{error.message} (given up after {tried})", reason=error.reason, produced=error.produced
            )
        return wait

    def _check_rule(self, replied: int) -> None:
        """A server from before the rules were told apart says nothing, and means agreement."""
        if replied != wire.rule_to_wire(self._rule) and (replied or self._rule is not Rule.AGREEMENT):
            raise TandemError(
                "FAILED_PRECONDITION",
                f"rule: the TargetVerifier at {self.peer.address} does not verify by {self._rule.value}, which was "
                f"asked for; it says {wire.rule_name(replied)}",
            )

    async def verify(
        self, tokens: Sequence[int], draft: Sequence[int], distributions: Sequence[SparseDistribution] = ()
    ) -> Verdict:
        request, stale = self.request(len(tokens), tokens[-1], draft, distributions), 0
        while True:
            try:
                answer = await self.ask(request)
            except TandemError as error:
                await self.reopen(tokens, error)
                continue
            self._stats.network_seconds += answer.network_seconds
            if answer.verdict is not None:
                self.patience.progress()
                return answer.verdict
            stale += 1
            held = f"round at {len(tokens)} is stale: the verifier holds {answer.committed_length} tokens"
            if stale == ATTEMPTS:
                raise TandemError("ABORTED", held, produced=tuple(tokens[self._prompt_length :]))
            await self.refresh(tokens)

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
        seconds = self.patience.limited(self.client.deadlines.verify)
        reply = await self._call(self.peer.stub.Verify, request, seconds)
        return wire.answer_from_wire(reply, time.perf_counter() - sent)

    async def reopen(self, tokens: Sequence[int], cause: TandemError) -> None:
        """After `cause`: opens the session again with all that is committed. Raises TandemError, perhaps the cause."""
        await asyncio.sleep(self._lost(cause, tokens))
        await self._open(tokens)

    async def refresh(self, tokens: Sequence[int]) -> None:
        """Likewise where it is there, and holds other tokens than `tokens`."""
        await self._open(tokens)

    async def close(self) -> None:
        """Frees the slot, also while this task is being cancelled; the lease frees it if the call fails."""
        if not self._session_id:
            return
        request = pb.CloseSessionRequest(session_id=self._session_id)
        self._session_id = ""
        await asyncio.shield(asyncio.ensure_future(self._end_session(request)))

    async def _end_session(self, request: pb.CloseSessionRequest) -> None:
        """Where nobody waits any more, its failure must not be an exception that nobody retrieves."""
        with contextlib.suppress(TandemError):
            await self._call(self.peer.stub.CloseSession, request, self.client.deadlines.close)

    async def _call(self, method: Callable[..., Awaitable[Any]], request: Any, timeout: float) -> Any:
        self._stats.bytes_up += request.ByteSize()
        try:
            reply = await method(request, timeout=timeout, metadata=outgoing())
        except grpc.RpcError as error:
            raise from_rpc(error) from None
        self._stats.bytes_down += reply.ByteSize()
        return reply
