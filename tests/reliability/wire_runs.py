"""A wire client of runs that trusts nothing and is none of ours: it drafts late and wrong, moves its
limits, reads slowly, leaves and comes back on another stream, and checks every limit that it set."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import grpc

from tandem.v1 import target_verifier_pb2 as pb
from tests.reliability.traffic import Ask, Ended, EndedQuietly, SessionClient
from tests.toy import END

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
        except asyncio.InvalidStateError:  # the stream ended: what it ended with is raised here
            async for _ in self._stream:
                pass
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
