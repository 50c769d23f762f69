"""What a case is run against: one architecture over one transport on one runner, here or elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from tandem.rpc.channel import FUSED, MESSAGES, STUBS, open_channel
from tandem.rpc.client_duplex import StreamStatus
from tandem.rpc.generation_client import GenerationClient
from tandem.speculation.types import GenerationRequest, ModelInfo, SamplingParams
from tandem.v1 import target_verifier_pb2 as pb
from tests.support import HANG, Answer, Refusal, Site, answer, let_all_expire, until

ARCHITECTURES = ("distributed", "fused", "draft_worker")
TRANSPORTS = ("unary", "stream", "run")
RUNNERS = ("toy", "torch")


@dataclass(frozen=True, slots=True)
class Combination:
    """Where a case runs."""

    architecture: str
    transport: str
    runner: str

    def __str__(self) -> str:
        return f"{self.architecture}-{self.transport}-{self.runner}"


COMBINATIONS = tuple(Combination(a, t, r) for r in RUNNERS for a in ARCHITECTURES for t in TRANSPORTS)


class LeftOut(Exception):
    """A case that this server's limits leave no room for."""


@dataclass(slots=True)
class Inside:
    """What only a server in this process lets a case reach: its sites, the target's first."""

    target: Site | None
    front: Site | None

    @property
    def sites(self) -> list[Site]:
        return [site for site in (self.target, self.front) if site]

    async def expire(self) -> int:
        """The lease of every session that nobody uses runs out now; how many there were."""
        assert self.target and self.target.verifier
        before = len(self.target.verifier.sessions)
        await let_all_expire(self.target)
        return before - len(self.target.verifier.sessions)

    async def lease_runs_out(self) -> None:
        """Waits until the server itself notices. The case's lease is short; sessions opened later have a long one."""
        assert self.target and self.target.verifier
        sessions = self.target.verifier.sessions
        await until(lambda: len(sessions) == 0)
        sessions.lease_seconds = HANG

    async def all_free(self) -> None:
        for site in self.sites:
            if site.engine:
                slots = site.engine.slots
                await until(lambda slots=slots: slots.free == slots.count)


@dataclass(slots=True)
class Bench:
    """One deployment under test. `stub` is that of its TargetVerifier, None where there is none.

    `featured`: that of one that hands out features, if there is one.
    """

    combination: Combination
    info: ModelInfo
    generate: Callable[[GenerationRequest], Any]
    plain: Callable[..., Any]  # (prompt, sampling, count, adapter="") to tokens
    stub: Any = None
    worker: Any = None
    front: Any = None  # the stub whose Generate is asked, and its request message
    inside: Inside | None = None
    faults: Any = None  # the script of faults at the target (tests/reliability), where it is here
    featured: Any = None
    _made: int = field(default=0)

    def prompt(self, number: int = 0, length: int = 12) -> list[int]:
        """Tokens of the vocabulary, others for another number."""
        most = min(self.info.vocab_size, 250)
        return [(7 + 31 * i + 13 * number + number * number * i) % most for i in range(length)]

    async def expected(
        self, prompt: Sequence[int], sampling: SamplingParams, count: int, adapter: str = ""
    ) -> list[int]:
        """What the target alone says, past its end; with an adapter, if one is named."""
        return list(await self.plain(prompt, sampling, count, **({"adapter": adapter} if adapter else {})))

    def adapters(self) -> list[str]:
        """The names of two adapters, or more. Raises LeftOut if there are fewer."""
        target = self.inside.sites[0].engine if self.inside else None
        names = list(target.adapters.revisions) if target else [name for name, _ in self.info.adapters]
        if len(names) < 2:
            raise LeftOut("it needs two adapters of its target")
        return names

    async def ask(self, prompt: Sequence[int], count: int, **rest: Any) -> Answer:
        request = GenerationRequest(
            token_ids=tuple(prompt), max_new_tokens=count, **({"ignore_end_of_sequence": True} | rest)
        )
        return await asyncio.wait_for(answer(self.generate, request), HANG)

    def session_id(self) -> str:
        self._made += 1
        return f"conformance-{id(self):x}-{self._made}"

    def rounds(self) -> Rounds:
        """A way to send rounds, over this combination's transport."""
        return Rounds(self.stub, self.combination.transport == "stream")


class Rounds:
    """Rounds as calls of their own, or over one stream; a refusal ends the stream, and the next round opens another."""

    def __init__(self, target: Any, streams: bool) -> None:
        self._target, self._streams = target, streams
        self._stream: Any = None

    async def __aenter__(self) -> Rounds:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Breaks the stream, as a lost connection would."""
        if self._stream is not None:
            self._stream.cancel()
        self._stream = None

    async def send(self, request: pb.VerifyRequest) -> pb.VerifyResponse:
        """Raises Refusal. A stream on which no round came for the lease ends: the round goes over another."""
        try:
            return await self._send(request)
        except (grpc.RpcError, asyncio.InvalidStateError) as error:  # the latter: the stream had ended before
            refusal = Refusal(self._status.error(error) if self._stream else error)
            self._stream = None
        if refusal.reason == "STREAM_IDLE":
            return await self.send(request)
        raise refusal

    async def _send(self, request: pb.VerifyRequest) -> pb.VerifyResponse:
        if not self._streams:
            return await self._target.Verify(request, timeout=HANG)
        if self._stream is None:
            self._stream = self._target.VerifyStream(timeout=60)
            self._status = StreamStatus(self._stream)
        await self._stream.write(request)
        reply = await self._stream.read()
        if reply is grpc.aio.EOF:
            raise AssertionError("a stream of rounds ended without a status")
        return reply

    async def refused(self, request: pb.VerifyRequest) -> Refusal:
        try:
            await self.send(request)
        except Refusal as refusal:
            return refusal
        raise AssertionError("the round was answered; it should have been refused")


@contextlib.asynccontextmanager
async def elsewhere(address: str, service: str) -> AsyncIterator[Bench]:
    """A server that runs already: what it says alone is asked of itself, undrafted."""
    architecture = {"TargetVerifier": "distributed", FUSED: "fused"}.get(service, "draft_worker")
    async with GenerationClient.connect(address, service) as client, open_channel(address) as channel:
        info = await client.model_info()

        async def plain(prompt: Sequence[int], sampling: SamplingParams, count: int, adapter: str = "") -> list[int]:
            request = GenerationRequest(
                token_ids=tuple(prompt),
                max_new_tokens=count,
                sampling=sampling,
                speculation_length=0,
                ignore_end_of_sequence=True,
                adapter=adapter,
            )
            return list((await answer(client.generate, request)).token_ids)

        listening = STUBS[service](channel)
        bench = Bench(Combination(architecture, "unary", "elsewhere"), info, client.generate, plain)
        bench.front = (listening, getattr(MESSAGES[service], f"{service}GenerateRequest"))
        if architecture == "distributed":
            bench.stub = listening
            bench.featured = listening if info.feature_layers else None
        if architecture == "draft_worker":
            bench.worker = listening
        yield bench
