"""A wire client of runs that trusts nothing and is none of ours: it drafts late and wrong, moves its
limits, reads slowly, leaves and comes back on another stream, and checks every limit that it set."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from tandem.rpc import wire
from tandem.rpc.errors import from_rpc
from tandem.rpc.stream_status import ENDED_MEANWHILE
from tandem.v1 import target_verifier_pb2 as pb
from tests.reliability.traffic import PATIENCE, Ask, Ended, after
from tests.toy import END

PASSING = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "NOT_FOUND", "RESOURCE_EXHAUSTED")
MOST_DRAFTS = 5


class WireRunClient:
    """One session whose target steps on by itself. `on_tokens` is told how many tokens came."""

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
        self._session = f"run-{ask.client}-{chance.randrange(2**32):x}"
        self._tokens, self._truth = list(ask.prompt), ask.truth(ask.count + MOST_DRAFTS)
        self._stops = {END}
        if chance.random() < 0.4:  # a stop of its own, somewhere in the text
            self._stops.add(chance.choice(ask.expected))
        self._end = self._stopping()
        self._stream: Any = None
        self._left: list[Any] = []  # streams that were abandoned without a word
        self._until = self._furthest = self._acknowledged = 0
        self._window = 0
        self.wrong: list[str] = []

    def _stopping(self) -> int:
        """The length at which the text ends: behind its first stop token, or with its tokens."""
        begin = len(self._ask.prompt)
        stop = next((i for i, token in enumerate(self._truth[begin:], begin + 1) if token in self._stops), 10**9)
        return min(begin + self._ask.count, stop)

    @property
    def expected(self) -> tuple[int, ...]:
        return tuple(self._truth[len(self._ask.prompt) : self._end])

    async def run(self) -> Ended:
        opened = False
        for _ in range(self._patience):
            try:
                if not opened and len(self._tokens) < self._end:
                    await self._open()
                    opened = True
                while len(self._tokens) < self._end:
                    await self._step()
                await self._close()
            except _EndedQuietly:
                opened = False  # it was superseded, or is behind: what we know is opened again
            except grpc.RpcError as error:
                failed = from_rpc(error)
                self._seconds = after(failed, self._seconds)
                opened = opened and failed.code != "NOT_FOUND" and self._chance.random() < 0.5
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
        for stream in self._left:
            stream.cancel()
        return Ended(self._tokens[len(self._ask.prompt) : self._end], error, self.expected)

    async def _open(self) -> None:
        request = pb.OpenSessionRequest(
            session_id=self._session,
            prefix=self._tokens,
            prompt_length=len(self._ask.prompt),
            sampling=wire.sampling_to_wire(self._ask.sampling),
            adapter=self._ask.adapter,
        )
        self._window = (await self._stub.OpenSession(request, timeout=self._seconds)).max_unread_tokens

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
            raise _EndedQuietly
        self._take(reply)

    async def _tell(self, message: pb.VerifyRequest) -> None:
        self._until = message.run_until
        self._furthest = max(self._furthest, self._until)
        self._acknowledged = max(self._acknowledged, message.base_length)
        try:
            await self._stream.write(message)
        except asyncio.InvalidStateError:  # the stream ended: what it ended with is raised here
            async for _ in self._stream:
                pass
            raise _EndedQuietly from None

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

    async def _close(self) -> None:
        """Closes, and compares how far the target went: nothing is committed after a stop or a limit."""
        self._leave()
        close = pb.CloseSessionRequest(session_id=self._session)
        reply = await self._stub.CloseSession(close, timeout=self._seconds)
        if reply.closed and reply.committed_length > len(self._tokens):
            self.wrong.append(f"{reply.committed_length} tokens were committed; the text ended at {len(self._tokens)}")

    def _leave(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.cancel()


class _EndedQuietly(Exception):
    """A run ended without an error: something else happened to its session, or its first message was stale."""
