"""A target that never waits, in virtual time, for the loop: its run is decided by the code that servers use."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.speculation.estimate import Estimate
from tandem.speculation.length import FixedLength
from tandem.speculation.loop import speculate
from tandem.speculation.never_waiting import NeverWaitingRounds, OnStep
from tandem.speculation.rounds import RoundsLost
from tandem.speculation.run_on import MAX_UNREAD, RunMessage, SelfPacedRun
from tandem.speculation.stopping import Stopping, TextStream
from tandem.speculation.types import Draft, LengthPlan, SpeculationStats, Verdict
from tandem.speculation.verification_mode import LookaheadPolicy

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
    tokens: int = 0
    fails_at: int = -1
    dry: bool = False
    _device: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def drafts(self) -> bool:
        return self._device.locked()

    async def open(self, prompt: Sequence[int]) -> None: ...

    async def close(self) -> None: ...

    async def draft_bonus(self, tokens: Sequence[int]) -> Draft:
        return await self.propose(tokens, LengthPlan(1, 1))

    async def propose(self, tokens: Sequence[int], plan: LengthPlan) -> Draft:
        if self.dry:
            return Draft()
        if self.tokens == self.fails_at:
            raise ValueError("the draft model broke")
        step = asyncio.ensure_future(self._step(plan.k))
        await asyncio.shield(step)  # a device finishes what it began
        proposed: list[int] = []
        for _ in range(plan.k):
            proposed.append(self._one([*tokens, *proposed]))
        return Draft(tuple(proposed), compute_seconds=plan.k * self.seconds)

    async def _step(self, k: int) -> None:
        async with self._device:
            self.tokens += k
            await asyncio.sleep(k * self.seconds)

    def _one(self, tokens: Sequence[int]) -> int:
        right = random.Random(hash((0, *tokens))).random() < self.acceptance
        return truth(tokens) if right else (truth(tokens) + 1) % VOCABULARY


@dataclass
class RunningTarget:
    """A RunVerifier. Messages and steps travel; `jitter` delays each message by up to so many seconds more.

    `breaks`: numbers of steps, of all runs together, after which the run is lost with all that travels.
    """

    verify_seconds: float = 0.009
    rtt: float = 0.0
    jitter: float = 0.0
    breaks: frozenset[int] = frozenset()
    refuses: bool = False
    window: int = MAX_UNREAD
    row_seconds: float = 0.0
    beside: SimulatedDraft | None = None  # on the same cores: steps take `slowed` times as long while it drafts
    slowed: float = 1.0
    committed: list[int] = field(default_factory=list)
    steps: int = 0
    drafted_steps: int = 0
    resumed: int = 0
    sent: int = 0
    furthest: int = 0
    closed: bool = False
    most_unread: int = 0
    read: int = 0
    _run: SelfPacedRun | None = None
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _replies: asyncio.Queue = field(default_factory=asyncio.Queue)
    _tasks: list[asyncio.Task] = field(default_factory=list)
    _chance: random.Random = field(default_factory=lambda: random.Random(5))

    async def open(self, prompt: Sequence[int]) -> None:
        pass

    def begin(self, tokens: Sequence[int], on_step: OnStep) -> None:
        self.committed, self.read = list(tokens), len(tokens)
        self._tasks.append(asyncio.create_task(self._deliver(on_step)))
        self._run = SelfPacedRun(self.committed, max_unread=self.window)
        self._tasks.append(asyncio.create_task(self._go_on(self._run)))

    def send(self, message: RunMessage) -> None:
        assert self._run is not None
        self.sent += 1
        self._tasks.append(asyncio.create_task(self._carry(self._run, message)))

    async def _carry(self, run: SelfPacedRun, message: RunMessage) -> None:
        await asyncio.sleep(self.rtt / 2 + self._chance.random() * self.jitter)
        run.receive(message)
        self._wake.set()

    async def _go_on(self, run: SelfPacedRun) -> None:
        while True:
            while (draft := run.next_draft()) is None:
                self._wake.clear()
                await self._wake.wait()
            slowed = self.slowed if self.beside and self.beside.drafts else 1.0
            await asyncio.sleep(seconds := slowed * (self.verify_seconds + len(draft) * self.row_seconds))
            committed: list[int] = []
            for guess in [*draft, None]:
                committed.append(truth([*self.committed, *committed]))
                if committed[-1] != guess:
                    break
            run.follow(committed)
            self.committed += committed
            self.steps += 1
            self.drafted_steps += bool(draft)
            self.furthest = max(self.furthest, len(self.committed))
            self.most_unread = max(self.most_unread, len(self.committed) - self.read)
            if self.steps in self.breaks:
                self._replies.put_nowait((asyncio.get_running_loop().time(), None))
                return
            verdict = Verdict(tuple(committed), len(committed) - 1, 0.0, seconds, width=len(draft) + 1)
            verdict.drafted, verdict.network_seconds = len(draft), self.rtt
            self._replies.put_nowait((asyncio.get_running_loop().time() + self.rtt / 2, verdict))

    async def _deliver(self, on_step: OnStep) -> None:
        while not self.refuses:
            arrives, step = await self._replies.get()
            await asyncio.sleep(max(0.0, arrives - asyncio.get_running_loop().time()))
            if step is None:
                return on_step(RoundsLost(ConnectionError("lost")))
            self.read += len(step.token_ids)
            on_step(step)
        on_step(RoundsLost(ConnectionError("refused")))

    async def resume(self, tokens: Sequence[int], cause: Exception) -> None:
        self.resumed += 1
        if self.refuses and self.resumed == 3:
            raise cause
        await self._end()
        self._run, self._replies = None, asyncio.Queue()

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def close(self) -> None:
        self.closed = True
        await self._end()


def measurements(draft: float, verify: float, rtt: float) -> Estimate:
    known = Estimate()
    known.drafted(1, draft)
    known.verified(verify, rtt)
    for tokens in range(1, 9):
        known.target.note(tokens, verify)
        known.alone.note(tokens, verify)
    known.alone_due = known.alone_every
    return known


@dataclass
class Ran:
    tokens: list[int]
    seconds: float
    stats: SpeculationStats
    target: RunningTarget
    draft: SimulatedDraft
    most_unused: int
    """Tokens that the target had committed, at most, and the caller had not asked for."""

    @property
    def tpot(self) -> float:
        return self.seconds / len(self.tokens)


async def generate(
    target: RunningTarget,
    draft: SimulatedDraft,
    count: int,
    width: int = 6,
    fixed: int | None = None,
    known: Estimate | None = None,
    pause: float = 0.0,
    stop: frozenset[int] = frozenset(),
    chunk: int = 6,
) -> Ran:
    """`count` tokens from a target that never waits. `pause`: seconds after each chunk before the next is asked for."""
    loop, stats = asyncio.get_running_loop(), SpeculationStats()
    known = known or measurements(draft.seconds, target.verify_seconds, target.rtt)
    known.alone_from = 0.0  # virtual time begins anew
    lookahead = LookaheadPolicy(width, known, fixed)
    rounds = NeverWaitingRounds(target, draft, lookahead, stats, len(PROMPT) + count, chunk, count, clock=loop.time)
    tokens: list[int] = []
    began = loop.time()
    stopping = Stopping(TextStream(), count, stop_token_ids=stop)
    try:
        furthest = 0
        async for chunk_ in speculate(PROMPT, FixedLength(width), rounds, stopping, stats):
            furthest = max(furthest, target.furthest - len(PROMPT) - len(tokens))
            tokens += chunk_.token_ids
            if pause:
                await asyncio.sleep(pause)
        return Ran(tokens, loop.time() - began, stats, target, draft, furthest)
    finally:
        await asyncio.sleep(1.0)  # a step of the draft model that was abandoned ends
