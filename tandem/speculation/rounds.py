"""Rounds of a drafter and a verifier, one at a time or several in flight.

A round is [last token, d1..dk]; full acceptance commits one more token, the bonus. To have another round in flight, the
drafter drafts the bonus (with the noise of the target's draw) and k more. A wrong bonus or draft token makes later
rounds stale: the verifier skips them, and drafting restarts. No verdict depends on this.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tandem.speculation.drafters import Drafter
from tandem.speculation.loop import Rounds
from tandem.speculation.types import Draft, LengthPlan, SparseDistribution, SpeculationStats, Verdict
from tandem.speculation.verification_mode import Depth

MAX_IN_FLIGHT = 8
ATTEMPTS = 3  # stale rounds, each after a reopening, before the request fails


class RoundsLost(Exception):
    """The rounds in flight are stale, or lost with their session. `cause`: the error if recovery fails."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class OutOfStep(RuntimeError):
    """The verifier holds other tokens than were committed, even after a reopening."""


class TargetSession(Protocol):
    """The target's session of one request."""

    async def open(self, prompt: Sequence[int]) -> None:
        """Takes a KV slot and processes the prompt."""

    async def resume(self, tokens: Sequence[int], cause: Exception) -> None:
        """Reopens the session with the committed `tokens`, or raises `cause`."""

    async def close(self) -> None:
        """Frees the slot; idempotent, at any time."""


class Verifier(TargetSession, Protocol):
    """Answers rounds in order."""

    def send(self, tokens: Sequence[int], draft: Draft) -> asyncio.Future[Verdict]:
        """Sends a round that extends `tokens`, which must not change. The verdict may raise RoundsLost."""


class VerifierHere(Verifier):
    """A verifier in this process, which loses no rounds."""

    async def verify(
        self, tokens: Sequence[int], draft: Sequence[int], distributions: Sequence[SparseDistribution] = ()
    ) -> Verdict:
        raise NotImplementedError

    def send(self, tokens: Sequence[int], draft: Draft) -> asyncio.Future[Verdict]:
        return asyncio.ensure_future(self.verify(tokens, draft.token_ids, draft.distributions))

    async def resume(self, tokens: Sequence[int], cause: Exception) -> None:
        raise cause


@dataclass(slots=True)
class _Flight:
    """A round in flight. `ahead`: it begins with a drafted bonus token."""

    draft: Draft
    verdict: asyncio.Future[Verdict]
    sent: float
    ahead: bool


@dataclass(slots=True)
class DraftedRounds(Rounds):
    """Rounds with up to `depth` in flight (None: one). No drafter: plain decoding."""

    verifier: Verifier
    drafter: Drafter | None = None
    depth: Depth | None = None
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    most_total: int = sys.maxsize  # tokens, prompt included, that are drafted ahead
    most_new: int | None = None
    clock: Callable[[], float] = time.perf_counter
    _end: int = 0
    _path: Sequence[int] = ()  # the committed tokens, and those assumed by the rounds in flight
    _flights: deque[_Flight] = field(default_factory=deque)
    _ahead: asyncio.Task[bool] | None = None  # drafts and sends one round; False: no bonus token was drafted
    _no_bonus: bool = False  # no bonus token can be drafted until the next verdict
    _plan: LengthPlan = field(init=False)
    _answered: float = 0.0

    async def open(self, prompt: Sequence[int]) -> None:
        await self.verifier.open(prompt)
        if self.drafter:
            await self.drafter.open(prompt)
        self._end = self.most_total if self.most_new is None else min(self.most_total, len(prompt) + self.most_new)

    async def round(self, tokens: Sequence[int], plan: LengthPlan) -> tuple[Draft, Verdict]:
        """Returns draft and verdict of the round after `tokens`: the oldest in flight, or a new one."""
        self._plan = plan
        if not self._flights and not (self._ahead and await self._ahead_sent()):
            self._path = tokens
            self._send(await self._drafted() if plan.k and self.drafter else Draft(), ahead=False)
        stale = 0
        while True:
            try:
                verdict = await self._first_verdict()
            except RoundsLost as lost:
                stale += isinstance(lost.cause, OutOfStep)
                if stale == ATTEMPTS:
                    raise lost.cause from None
                again = self._flights.popleft()
                await self._drop_in_flight()
                await self.verifier.resume(tokens, lost.cause)
            else:
                flight = self._flights.popleft()
                if not self._follows(tokens, flight, verdict):
                    await self._drop_in_flight()
                return flight.draft, verdict
            self._path = tokens
            self._send(again.draft, ahead=False)

    async def close(self) -> None:
        try:
            await self._drop_in_flight()
            if self.drafter:
                await self.drafter.close()
        finally:
            await self.verifier.close()

    async def _first_verdict(self) -> Verdict:
        """Waits for the oldest round in flight, and drafts ahead as far as it pays."""
        verdict = self._flights[0].verdict
        while not verdict.done():
            deepest = self.depth.of(self._plan.k) if self.depth else 1
            room = len(self._path) + 1 < self._end
            if self._ahead is None and not self._no_bonus and room and len(self._flights) < deepest:
                self._ahead = asyncio.create_task(self._draft_ahead(), name="draft ahead")
            if self._ahead is None:
                return await verdict
            either: list[asyncio.Future[Any]] = [verdict, self._ahead]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._ahead.done():
                await self._ahead_sent()
        return verdict.result()

    async def _draft_ahead(self) -> bool:
        """Drafts and sends a bonus token and a round after it; returns False without bonus."""
        bonus = await self._drafted(bonus=True)
        self.stats.spent(bonus)
        if not bonus.token_ids:
            return False
        self._path = [*self._path, *bonus.token_ids]
        self._send(await self._drafted(), ahead=True)
        return True

    async def _ahead_sent(self) -> bool:
        assert self._ahead is not None
        sent = await self._ahead
        self._ahead, self._no_bonus = None, not sent
        return sent

    async def _drafted(self, bonus: bool = False) -> Draft:
        began, path, drafter = self.clock(), self._path, self.drafter
        assert drafter is not None
        if bonus:
            draft = await drafter.draft_bonus(path)
        else:
            draft = await drafter.propose(path, self._plan.within(self._end - len(path) - 1))
        if self.depth:
            self.depth.estimate.drafted(len(draft.token_ids), self.clock() - began)
        return draft

    def _send(self, draft: Draft, ahead: bool) -> None:
        if self.depth:
            self.stats.sent(len(self._flights))
        verdict = self.verifier.send(self._path, draft)
        self._flights.append(_Flight(draft, verdict, self.clock(), ahead))
        self._path = [*self._path, *draft.token_ids]

    def _follows(self, tokens: Sequence[int], flight: _Flight, verdict: Verdict) -> bool:
        """Records a verdict; returns whether the rounds in flight still follow."""
        now, beside_target = self.clock(), verdict.queue_seconds + verdict.compute_seconds
        network_seconds = verdict.network_seconds or 0.0
        waited = now - max(flight.sent, self._answered) - beside_target
        self._answered = now
        self.stats.network_seconds += min(network_seconds, max(0.0, waited))  # overlapping rounds do not wait twice
        self.stats.guessed_rounds += flight.ahead
        self._no_bonus = False
        if not self.depth:
            return True
        self.depth.estimate.verified(beside_target, network_seconds)
        committed = [*tokens, *verdict.token_ids]
        matches = self._path[: len(committed)] == committed
        return matches or not (self._flights or self._ahead)

    async def _drop_in_flight(self) -> None:
        if self._ahead:
            self._ahead.cancel()
            await asyncio.gather(self._ahead, return_exceptions=True)
            self._ahead = None
        for flight in self._flights:
            self.stats.stale(flight.draft, flight.ahead)
            flight.verdict.cancel()
        self._flights.clear()
