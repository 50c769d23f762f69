"""A target and a draft model in virtual time, for the pipelined loop: what they say is arithmetic."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType

import tandem.speculation.rounds
from tandem.speculation.estimate import Estimate, Times
from tandem.speculation.length import FixedLength
from tandem.speculation.loop import speculate
from tandem.speculation.stopping import Stopping, StopRules
from tandem.speculation.types import Draft, SpeculationStats, Verdict
from tandem.speculation.verification_mode import Depth, Pipeline
from tests.speculation.laws import Silent

PROMPT = [5, 6, 7]
VOCABULARY = 97


def truth(tokens: Sequence[int]) -> int:
    """What the target says after `tokens`: depends on all of them."""
    return random.Random(hash(tuple(tokens))).randrange(VOCABULARY)


def said(count: int) -> list[int]:
    tokens = list(PROMPT)
    while len(tokens) < len(PROMPT) + count:
        tokens.append(truth(tokens))
    return tokens[len(PROMPT) :]


@dataclass
class SimulatedDraft:
    """Right with a chance of `acceptance` at every token; takes `seconds` a token. One call at a time, as a device."""

    acceptance: float
    seconds: float = 0.0
    salt: int = 0
    tokens: int = 0
    fails_at: int = -1
    dry: bool = False
    _device: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def open(self, prompt: Sequence[int]) -> None: ...

    async def close(self) -> None: ...

    async def draft_bonus(self, tokens: Sequence[int]) -> Draft:
        return await self.propose(tokens, 1)

    async def propose(self, tokens: Sequence[int], k: int, model_k: int | None = None) -> Draft:
        if self.dry:
            return Draft()
        if self.tokens == self.fails_at:
            raise ValueError("the draft model broke")
        step = asyncio.ensure_future(self._step(k))
        await asyncio.shield(step)  # a device finishes what it began
        proposed: list[int] = []
        for _ in range(k):
            proposed.append(self._one([*tokens, *proposed]))
        return Draft(tuple(proposed), compute_seconds=k * self.seconds)

    async def _step(self, k: int) -> None:
        async with self._device:
            self.tokens += k
            await asyncio.sleep(k * self.seconds)

    def _one(self, tokens: Sequence[int]) -> int:
        right = random.Random(hash((self.salt, *tokens))).random() < self.acceptance
        return truth(tokens) if right else (truth(tokens) + 1) % VOCABULARY


@dataclass
class SimulatedTarget:
    """A Verifier: rounds travel, are verified one by one in order, and travel back. Keeps what it did.

    `breaks`: numbers of sent rounds (from 0) at which everything in flight is lost. `refuses`: at all of them.
    """

    verify_seconds: float = 0.0
    rtt: float = 0.0
    breaks: frozenset[int] = frozenset()
    refuses: bool = False
    module: ModuleType = tandem.speculation.rounds
    tokens: list[int] = field(default_factory=list)
    steps: int = 0
    sent: int = 0
    in_flight: int = 0
    deepest: int = 0
    resumed: int = 0
    closed: bool = False
    longest: int = 0
    _tasks: list[asyncio.Task] = field(default_factory=list)
    _before: asyncio.Future | None = None

    async def open(self, prompt: Sequence[int]) -> None:
        self.tokens = list(prompt)

    def send(self, tokens: Sequence[int], draft: Draft) -> asyncio.Future:
        base_length, last_token = len(tokens), tokens[-1]
        answer = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda a: a.cancelled() or a.exception())
        self.longest = max(self.longest, base_length + len(draft.token_ids) + 1)
        self.in_flight += 1
        self.deepest = max(self.deepest, self.in_flight)
        broken = self.sent in self.breaks or self.refuses
        self.sent += 1
        if broken:
            for task in self._tasks:
                task.cancel()
            self._before = None
        done = asyncio.get_running_loop().create_future()
        work = self._travel(base_length, last_token, draft, answer, self._before, done, broken)
        self._before = done
        self._tasks.append(asyncio.create_task(work))
        return answer

    async def _travel(self, base, last, draft, answer, before, done, broken) -> None:
        try:
            await asyncio.sleep(self.rtt / 2)
            if broken:
                raise self.module.RoundsLost(ConnectionError("lost"))
            if before:
                await before
            verdict = await self._verify(base, last, draft)
            done.set_result(None)
            await asyncio.sleep(self.rtt / 2)
            if not answer.done():
                answer.set_result(self.module.Answer(verdict, len(self.tokens), self.rtt))
        except self.module.RoundsLost as error:
            if not answer.done():
                answer.set_exception(error)
        except asyncio.CancelledError:
            if not answer.done():
                answer.set_exception(self.module.RoundsLost(ConnectionError("lost")))
            raise
        finally:
            self.in_flight -= 1
            if not done.done():
                done.set_result(None)

    async def _verify(self, base: int, last: int, draft: Draft) -> Verdict | None:
        if base != len(self.tokens) or self.tokens[-1] != last:
            return None
        self.steps += 1
        await asyncio.sleep(self.verify_seconds)
        committed: list[int] = []
        for guess in [*draft.token_ids, None]:
            committed.append(truth([*self.tokens, *committed]))
            if committed[-1] != guess:
                break
        self.tokens += committed
        return Verdict(tuple(committed), len(committed) - 1, 0.0, self.verify_seconds)

    async def resume(self, tokens: Sequence[int], cause: Exception) -> None:
        self.resumed += 1
        if self.refuses and self.resumed == 3:
            raise cause
        self.tokens = list(tokens)

    async def close(self) -> None:
        self.closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def fixed_depth(depth: int) -> Depth:
    """Always so many rounds in flight."""

    class Fixed(Depth):
        def of(self, k: int) -> int:
            return depth if k else 1

    return Fixed(Pipeline.ON, depth)


def measured(times: Times) -> Estimate:
    known = Estimate()
    known.drafted(1, times.draft)
    known.verified(times.verify, times.rtt)
    return known


@dataclass
class Run:
    tokens: list[int]
    seconds: float
    stats: SpeculationStats
    target: SimulatedTarget
    draft: SimulatedDraft

    @property
    def tpot(self) -> float:
        return self.seconds / len(self.tokens)


async def generate(
    target: SimulatedTarget, draft: SimulatedDraft, depth: Depth, k: int, count: int, module: ModuleType | None = None
) -> Run:
    """`count` tokens through the pipelined loop."""
    loop, stats = asyncio.get_running_loop(), SpeculationStats()
    rounds = (module or tandem.speculation.rounds).DraftedRounds(
        target, draft, depth, stats, len(PROMPT) + count, count, clock=loop.time
    )
    tokens: list[int] = []
    began = loop.time()
    stopping = Stopping(StopRules(count), Silent())
    async for chunk in speculate(PROMPT, FixedLength(k), rounds, stopping, stats):
        tokens += chunk.token_ids
    return Run(tokens, loop.time() - began, stats, target, draft)
