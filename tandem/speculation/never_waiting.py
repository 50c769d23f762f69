"""Rounds at a verifier that never waits: a step is a round. Under agreement no token depends on when drafts arrive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from tandem.speculation.ahead import DraftingAhead
from tandem.speculation.drafters import Drafter
from tandem.speculation.loop import Rounds
from tandem.speculation.rounds import ATTEMPTS, OutOfStep, RoundsLost, TargetSession
from tandem.speculation.run_on import RunMessage
from tandem.speculation.types import Draft, LengthPlan, Proposer, SpeculationStats, Verdict
from tandem.speculation.verification_mode import LookaheadPolicy

REJECTED = -1  # stands for a rejected draft token: only the number counts


OnStep = Callable[[Verdict | Exception], None]


class RunVerifier(TargetSession, Protocol):
    """Steps on without waiting for drafts."""

    @property
    def window(self) -> int:
        """Most unacknowledged tokens."""

    def begin(self, tokens: Sequence[int], on_step: OnStep) -> None:
        """Begins a run after `tokens`, with the first message; `on_step` gets its steps, and at last its error."""

    def send(self, message: RunMessage) -> None:
        """Sends the run a message."""


# Feeds a run with another process's drafts, given the prompt's length
DraftsElsewhere = Callable[[DraftingAhead, int], Awaitable[None]]


class OpenedAtUse(Drafter):
    """A request's drafter, which is opened with its prompt once drafts are expected to pay."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self._open = drafter, False
        self.prompt: list[int] = []

    async def propose(self, tokens: Sequence[int], plan: LengthPlan) -> Draft:
        if not self._open:
            await self._drafter.close()  # frees what an opening that was cancelled may hold
            await self._drafter.open(self.prompt)
            self._open = True
        return await self._drafter.propose(tokens, plan)

    async def close(self) -> None:
        await self._drafter.close()


@dataclass(slots=True)
class NeverWaitingRounds(Rounds):
    """Rounds of a drafter and a verifier that never waits."""

    verifier: RunVerifier
    drafter: Drafter
    lookahead: LookaheadPolicy
    stats: SpeculationStats
    most_total: int  # tokens, prompt included
    chunk: int  # most tokens of a drafter's call
    most_new: int | None = None  # tokens after the prompt
    clock: Callable[[], float] = time.perf_counter
    measures: bool = True  # see DraftingAhead
    elsewhere: DraftsElsewhere | None = None  # in place of `drafter`
    copies: bool = False  # steps without a draft may copy from the text
    _end: int = 0
    _prompt: list[int] = field(default_factory=list)
    _ahead: DraftingAhead | None = None
    _steps: asyncio.Queue[Verdict | Exception] = field(default_factory=asyncio.Queue)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _ended: float = 0.0
    _opened: OpenedAtUse = field(init=False)
    _verified: int = 0  # draft tokens that steps of this run verified

    def __post_init__(self) -> None:
        self._opened = OpenedAtUse(self.drafter)

    def begin(self, prompt: Sequence[int]) -> None:
        self._begin_request(prompt)
        self._begin(prompt)

    async def open(self, prompt: Sequence[int]) -> None:
        await self.verifier.open(prompt)
        self._begin_request(prompt)

    def _begin_request(self, prompt: Sequence[int]) -> None:
        self._prompt = self._opened.prompt = list(prompt)
        self._end = self.most_total if self.most_new is None else min(self.most_total, len(prompt) + self.most_new)

    async def round(self, tokens: Sequence[int], plan: LengthPlan) -> tuple[Draft, Verdict]:
        stale = 0
        while True:
            if self._ahead is None:
                self._begin(tokens)
            assert self._ahead is not None
            waited = self.clock()
            found = await self._steps.get()
            if isinstance(found, RoundsLost):
                stale += isinstance(found.cause, OutOfStep)
                if stale == ATTEMPTS:
                    raise found.cause
                await self._leave()
                await self.verifier.resume(tokens, found.cause)
                continue
            if isinstance(found, Exception):
                raise found
            self._wait_counts(found, waited)
            self.stats.run_steps += 1
            draft = self._draft_of(found, self._ahead)
            self._ahead.was_used(found.token_ids)
            found.following = self._steps.qsize() > 1  # the last may be an error, after which the client connects again
            return draft, found

    async def suspend(self, tokens: Sequence[int]) -> None:
        """Ends the run; the session then holds `tokens`."""
        await self._leave()
        await self.verifier.resume(tokens, OutOfStep("the run was ended"))

    async def close(self) -> None:
        try:
            await self._leave()
            await self._opened.close()
        finally:
            await self.verifier.close()

    def _begin(self, tokens: Sequence[int]) -> None:
        self._ahead = DraftingAhead(
            self._opened,
            self.lookahead,
            self.verifier.send,
            self.stats,
            list(tokens),
            self._end,
            self.chunk,
            min(self.verifier.window, self._end),
            self.clock,
            self.measures,
            self.elsewhere is None,
            self.lookahead.most if self.copies else 0,
        )
        self._steps = asyncio.Queue()
        self.verifier.begin(tokens, partial(self._on_step, self._ahead))
        self._ahead.begin()
        parts: list[Callable[[], Awaitable[None]]] = [self._ahead.run]
        if self.elsewhere:
            parts.append(partial(self.elsewhere, self._ahead, len(self._prompt)))
        self._tasks = [asyncio.create_task(self._reported(part), name="draft ahead") for part in parts]

    def _on_step(self, ahead: DraftingAhead, step: Verdict | Exception) -> None:
        if ahead is not self._ahead:  # it was left meanwhile
            self.stats.wasted_steps += isinstance(step, Verdict)
            return
        if isinstance(step, Verdict):
            self._verified += 0 if step.copied else step.drafted
            self.lookahead.stepped(
                step.drafted, step, self.clock(), step.copied or (step.drafted > 0 and ahead.copies_next)
            )
            self.lookahead.estimate.verified(step.queue_seconds + step.compute_seconds, step.network_seconds)
            ahead.arrived(step.token_ids)
        self._steps.put_nowait(step)

    async def _reported(self, part: Callable[[], Awaitable[None]]) -> None:
        try:
            await part()
        except Exception as error:
            self._steps.put_nowait(error)

    def _draft_of(self, step: Verdict, ahead: DraftingAhead) -> Draft:
        accepted = step.token_ids[: step.accepted]
        rejected = (REJECTED,) * (step.drafted - len(accepted))
        by = (Proposer.NGRAM,) * step.drafted if step.copied else ahead.proposers(step.drafted)
        return Draft((*accepted, *rejected), proposed_by=by, ahead=True)

    def _wait_counts(self, step: Verdict, waited: float) -> None:
        # Network time is waiting that a remote target's own time does not explain.
        now = self.clock()
        if step.network_seconds is not None:
            at_target = step.queue_seconds + step.compute_seconds
            self.stats.network_seconds += max(0.0, now - max(waited, self._ended) - at_target)
        self._ended = now

    async def _leave(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._ahead:
            self.stats.stale_drafts += max(0, self._ahead.drafted - self._verified)
            self._verified = 0
        self._ahead = None
        while not self._steps.empty():  # read, and never used
            self.stats.wasted_steps += isinstance(self._steps.get_nowait(), Verdict)
