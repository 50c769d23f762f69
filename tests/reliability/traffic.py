"""What clients do in a schedule: each asks for one continuation, by one of our ways or by a wire client of its own."""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc

from tandem.rpc import wire
from tandem.rpc.client_duplex import ENDED_MEANWHILE
from tandem.rpc.received_errors import TandemError, from_rpc
from tandem.speculation.types import Chunk, GenerationRequest, Rule, SamplingParams
from tandem.v1 import target_verifier_pb2 as pb
from tests.support import oracle
from tests.toy import END

PATIENCE = 40
PASSING = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "NOT_FOUND", "RESOURCE_EXHAUSTED")
LONGEST = 3.2  # seconds that an attempt waits
"""How often a client of this file asks again before it gives up; a schedule injects fewer faults than that."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One client's wish. Its prompt's first token is its name."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    count: int
    k: int
    rule: Rule = Rule.AGREEMENT
    adapter: str = ""

    @property
    def client(self) -> int:
        return self.prompt[0]

    @property
    def expected(self) -> tuple[int, ...]:
        return oracle(self.prompt, self.sampling, self.count, adapter=self.adapter)

    def truth(self, count: int) -> list[int]:
        """The prompt and what the target alone says after it, past its end."""
        return [*self.prompt, *oracle(self.prompt, self.sampling, count, past_the_end=True, adapter=self.adapter)]

    def request(self) -> GenerationRequest:
        return GenerationRequest(
            token_ids=self.prompt,
            max_new_tokens=self.count,
            sampling=self.sampling,
            speculation_length=self.k,
            rule=self.rule,
            adapter=self.adapter,
        )


def wishes(chance: random.Random, clients: int, least: int = 8) -> list[Ask]:
    asks = []
    for i in range(clients):
        prompt = (65 + i, *(chance.randrange(256) for _ in range(chance.randrange(30))))
        warm = SamplingParams(chance.choice([0.5, 1.0]), chance.choice([0, 40]), 0.95, 0.0, chance.randrange(2**40))
        sampling = SamplingParams() if chance.random() < 0.5 else warm
        asks.append(Ask(prompt, sampling, chance.randrange(least, least + 28), chance.randrange(6)))
    return asks


@dataclass(slots=True)
class Ended:
    """What a client was left with. `expected`: what it should be, where that is not the target's plain output."""

    tokens: list[int]
    error: str = ""
    expected: tuple[int, ...] | None = None


async def by_generate(generate: Any, ask: Ask, again: int = PATIENCE, pause: float = 0.01) -> Ended:
    """A stream of one of our clients or generators; one that breaks is asked for again from the start."""
    tokens: list[int] = []
    for attempt in range(again):
        tokens = []
        try:
            async for event in generate(ask.request()):
                if isinstance(event, Chunk):
                    tokens += event.token_ids
            return Ended(tokens)
        except TandemError as error:
            if error.code != "UNAVAILABLE" or attempt + 1 == again:
                return Ended(tokens, str(error))
            if tokens != list(ask.expected[: len(tokens)]):
                return Ended(tokens, f"wrong before it broke off: {error}")
            await asyncio.sleep(pause)
    return Ended(tokens, "patience ran out")


def after(failed: TandemError, seconds: float) -> float:
    """How long the next attempts wait for a reply: longer where one came too late, as from a busy machine."""
    return min(2 * seconds, LONGEST) if failed.code == "DEADLINE_EXCEEDED" else seconds


class EndedQuietly(Exception):
    """A stream ended without an error: something else happened to its session, or its first message was stale."""


class SessionClient(ABC):
    """A client of the session protocol that trusts nothing and is none of ours. `on_tokens`: called as tokens come."""

    reopens = 0.5  # chance of opening again what may be open, which resumes it (G4)

    def __init__(
        self,
        stub: Any,
        ask: Ask,
        chance: random.Random,
        seconds: float = 0.4,
        patience: int = PATIENCE,
        pause: float = 0.01,
    ) -> None:
        self._stub, self._ask, self._chance = stub, ask, chance
        self._seconds, self._patience, self._pause = seconds, patience, pause
        self.on_tokens: Callable[[int], None] = lambda tokens: None
        self._session = f"wire-{ask.client}-{chance.randrange(2**32):x}"
        self._tokens, self._end = list(ask.prompt), len(ask.prompt) + len(ask.expected)
        self._stream: Any = None
        self.wrong: list[str] = []

    async def run(self) -> Ended:
        opened = False
        for _ in range(self._patience):
            try:
                if not opened and len(self._tokens) < self._end:  # a session that may be closed is not opened again
                    await self._open()
                    opened = True
                while len(self._tokens) < self._end:
                    await self._step()
                self._leave()
                close = pb.CloseSessionRequest(session_id=self._session)
                self._closed(await self._stub.CloseSession(close, timeout=self._seconds))
            except EndedQuietly:
                opened = False
            except grpc.RpcError as error:
                failed = from_rpc(error)
                self._seconds = after(failed, self._seconds)
                opened = opened and failed.code != "NOT_FOUND" and self._chance.random() >= self.reopens
                code = "UNAVAILABLE" if (failed.code, failed.message) == ENDED_MEANWHILE else failed.code
                if code not in PASSING:
                    return self._ended(str(failed))
                await asyncio.sleep(failed.retry_seconds or self._pause)
            else:
                return self._ended("; ".join(self.wrong))
            finally:
                self._leave()
        return self._ended("patience ran out")

    def _ended(self, error: str) -> Ended:
        """Rounds may reach past the end; what follows it is no output."""
        return Ended(self._tokens[len(self._ask.prompt) : self._end], error)

    async def _open(self) -> Any:
        request = pb.OpenSessionRequest(
            session_id=self._session,
            prefix=self._tokens,
            prompt_length=len(self._ask.prompt),
            sampling=wire.sampling_to_wire(self._ask.sampling),
            adapter=self._ask.adapter,
        )
        return await self._stub.OpenSession(request, timeout=self._seconds)

    @abstractmethod
    async def _step(self) -> None:
        """Adds tokens. Raises grpc.RpcError or EndedQuietly."""

    @abstractmethod
    def _closed(self, reply: Any) -> None:
        """Checks the reply to a close."""

    def _leave(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.cancel()


class WireClient(SessionClient):
    """Drafts from the truth with errors, drafts anew for a retry (G2), and asks out of turn now and then."""

    reopens = 0.2

    def __init__(self, stub: Any, ask: Ask, chance: random.Random, streams: bool, **rest: Any) -> None:
        super().__init__(stub, ask, chance, **rest)
        self._streams, self._text = streams, [*ask.prompt, *ask.expected]

    async def _step(self) -> None:
        at = len(self._tokens)
        if at > len(self._ask.prompt) and self._chance.random() < 0.1:
            await self._out_of_turn()
        text = self._text[at : at + self._ask.k]
        draft = [t if self._chance.random() < 0.7 else self._chance.randrange(256) for t in text]
        reply = await self._verify(at, self._tokens[-1], draft)
        if reply.stale:  # the server is elsewhere than we are: what we know is opened again
            if reply.committed_length < len(self._ask.prompt):
                self.wrong.append(f"committed length {reply.committed_length} is below the prompt's")
            await self._open()
        else:
            self._tokens += reply.token_ids
            self.on_tokens(len(reply.token_ids))

    def _closed(self, reply: Any) -> None:
        pass

    async def _out_of_turn(self) -> None:
        """A round that extends nothing: it must be stale, and change nothing."""
        at = len(self._tokens)
        base, last = self._chance.choice([(at, (self._tokens[-1] + 1) % 256), (at + 3, 5), (1, self._tokens[0] ^ 1)])
        reply = await self._verify(base, last, [])
        if not reply.stale:
            self.wrong.append(f"a round out of turn at {base} was answered: {reply}")

    async def _verify(self, base: int, last: int, draft: Sequence[int]) -> Any:
        request = pb.VerifyRequest(session_id=self._session, base_length=base, last_token=last, draft_tokens=draft)
        if not self._streams:
            return await self._stub.Verify(request, timeout=self._seconds)
        if self._stream is None:
            self._stream = self._stub.VerifyStream(timeout=20)
        try:
            await self._stream.write(request)
            reply = await self._stream.read()
        except asyncio.InvalidStateError:  # the stream ended between rounds
            reply = grpc.aio.EOF
        if reply is grpc.aio.EOF:
            stream, self._stream = self._stream, None
            await stream.read()  # raises the status that it ended with
            raise AssertionError("a stream ended without a status")
        return reply


MOST_DRAFTS = 5


class WireRunClient(SessionClient):
    """One session whose target steps on by itself."""

    def __init__(self, stub: Any, ask: Ask, chance: random.Random, **rest: Any) -> None:
        super().__init__(stub, ask, chance, **rest)
        self._truth, self._stops = ask.truth(ask.count + MOST_DRAFTS), {END}
        if chance.random() < 0.4:  # a stop of its own, somewhere in the text
            self._stops.add(chance.choice(ask.expected))
        self._end = self._stopping()
        self._left: list[Any] = []  # streams that were abandoned without a word
        self._until = self._furthest = self._acknowledged = 0
        self._window = 0

    def _stopping(self) -> int:
        """The length at which the text ends: behind its first stop token, or with its tokens."""
        begin = len(self._ask.prompt)
        stop = next((i for i, token in enumerate(self._truth[begin:], begin + 1) if token in self._stops), 10**9)
        return min(begin + self._ask.count, stop)

    @property
    def expected(self) -> tuple[int, ...]:
        return tuple(self._truth[len(self._ask.prompt) : self._end])

    def _ended(self, error: str) -> Ended:
        for stream in self._left:
            stream.cancel()
        return replace(super()._ended(error), expected=self.expected)

    async def _open(self) -> None:
        self._window = (await super()._open()).max_unread_tokens

    async def _step(self) -> None:
        """Sends something if it is due, or by chance, and reads a step."""
        if self._stream is None:
            self._stream = self._stub.VerifyStream(timeout=20)
            self._until = self._furthest = self._acknowledged = 0
            await self._tell(self._message(len(self._tokens), stop_token_ids=sorted(self._stops)))
        elif self._chance.random() < 0.02:
            self._left.append(self._stream)
            self._stream = None
            return
        elif len(self._tokens) >= self._until or self._chance.random() < 0.4:
            base = len(self._tokens)
            if self._chance.random() < 0.3 and base < self._until:  # late: what it drafts for was committed meanwhile
                base = self._chance.randrange(len(self._ask.prompt), base + 1)
            await self._tell(self._message(base))
            if self._chance.random() < 0.1:
                await asyncio.sleep(self._chance.uniform(0, 0.01))
            if len(self._tokens) >= self._until:
                return
        try:
            reply = await self._stream.read()
        except asyncio.InvalidStateError:
            reply = grpc.aio.EOF
        if reply is grpc.aio.EOF or reply.stale:
            raise EndedQuietly
        self._take(reply)

    async def _tell(self, message: pb.VerifyRequest) -> None:
        self._until = message.run_until
        self._furthest = max(self._furthest, self._until)
        self._acknowledged = max(self._acknowledged, message.base_length)
        try:
            await self._stream.write(message)
        except asyncio.InvalidStateError:  # the stream ended between messages
            await self._stream.read()  # raises the status that it ended with
            raise EndedQuietly from None

    def _message(self, base: int, **rest: Any) -> pb.VerifyRequest:
        chance = self._chance
        draft = self._noisy(self._truth[base : base + chance.randrange(9)])
        last = self._tokens[base - 1]
        if chance.random() < 0.05 and base > len(self._ask.prompt) and not rest:  # on other tokens than ours
            last = (last + 1) % 256
        until = self._end if chance.random() < 0.5 else min(self._end, len(self._tokens) + chance.randrange(1, 9))
        return pb.VerifyRequest(
            session_id=self._session,
            base_length=base,
            last_token=last,
            draft_tokens=draft,
            run_until=until,
            max_step_drafts=MOST_DRAFTS,
            **rest,
        )

    def _noisy(self, tokens: Sequence[int]) -> list[int]:
        return [token if self._chance.random() < 0.8 else self._chance.randrange(256) for token in tokens]

    def _take(self, reply: Any) -> None:
        known, tokens = len(self._tokens), list(reply.token_ids)
        if reply.committed_length - len(tokens) != known:
            self.wrong.append(f"a step to {reply.committed_length} followed {known} tokens")
        self._tokens += tokens
        self.on_tokens(len(tokens))
        if reply.replayed:
            return
        most = min(self._furthest, self._acknowledged + self._window)
        if len(self._tokens) > most or reply.drafted > MOST_DRAFTS or reply.accepted > reply.drafted:
            self.wrong.append(f"beyond its limits ({most}): {reply}")

    def _closed(self, reply: Any) -> None:
        """Nothing is committed after a stop or a limit."""
        if reply.closed and reply.committed_length > len(self._tokens):
            self.wrong.append(f"{reply.committed_length} tokens were committed; the text ended at {len(self._tokens)}")
