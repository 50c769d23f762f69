"""Runs rounds with several in flight: while verdicts travel, drafting continues after a drafted bonus token.

A round is [last token, d1..dk]. If all of it is accepted, it commits one token more, the bonus. The drafter drafts that
token (with the noise of the target's own draw) and k more after it, sends these as a round of their own, and so on. If
a bonus or draft token was wrong, every round sent after it is stale: the verifier answers it without computing, and
drafting starts again from what was committed. No verdict depends on this, so no token does.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tandem.speculation.depth import Depth
from tandem.speculation.drafters import BonusDrafter
from tandem.speculation.loop import Rounds
from tandem.speculation.types import Draft, SpeculationStats, Verdict

MAX_IN_FLIGHT = 8
ATTEMPTS = 3
"""How many times one round may be stale, although the session was reopened, before the request fails."""


class RoundsLost(Exception):
    """The rounds in flight are lost, and possibly the session. `cause`: the error to report if recovery fails."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class OutOfStep(RuntimeError):
    """The verifier holds other tokens than were committed, even after the session was reopened."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one round; no verdict if it was stale. `network_seconds`: time not spent at the target."""

    verdict: Verdict | None
    committed_length: int
    network_seconds: float = 0.0


class FlightVerifier(Protocol):
    """A target for one request that accepts several rounds at once and answers them in order."""

    async def open(self, prompt: Sequence[int]) -> None:
        """Takes a KV slot and processes the prompt."""

    def send(self, base_length: int, last_token: int, draft: Draft) -> asyncio.Future[Answer]:
        """Sends a round that extends `base_length` tokens ending in `last_token`. The answer may raise RoundsLost."""

    async def resume(self, tokens: Sequence[int], cause: Exception) -> None:
        """Reopens the session after RoundsLost (or OutOfStep) with this `cause`, with the committed `tokens`.

        Raises after too many attempts.
        """

    async def close(self) -> None:
        """Frees the slot. May be called at any time, and more than once."""


@dataclass(slots=True)
class _Flight:
    """A round in flight: its draft, and when it was sent. `ahead`: it began with a drafted bonus token."""

    draft: Draft
    answer: asyncio.Future[Answer]
    sent: float
    ahead: bool


@dataclass(slots=True)
class PipelinedRounds(Rounds):
    """Rounds of a drafter and a remote verifier, with several in flight as `depth` chooses.

    Nothing is drafted beyond `most_total` tokens, prompt included, or `most_new` tokens without it.
    """

    verifier: FlightVerifier
    drafter: BonusDrafter
    depth: Depth
    stats: SpeculationStats
    most_total: int
    most_new: int | None = None
    clock: Callable[[], float] = time.perf_counter
    _end: int = 0
    _path: list[int] = field(default_factory=list)  # the committed tokens, and those assumed by the rounds in flight
    _flights: deque[_Flight] = field(default_factory=deque)
    _ahead: asyncio.Task[bool] | None = None  # drafts and sends one round; False: no bonus token was drafted
    _no_bonus: bool = False  # no bonus token can be drafted until the next verdict
    _k: int = 0
    _model_k: int | None = None
    _answered: float = 0.0

    async def open(self, prompt: Sequence[int]) -> None:
        await self.verifier.open(prompt)
        await self.drafter.open(prompt)
        self._end = self.most_total if self.most_new is None else min(self.most_total, len(prompt) + self.most_new)

    async def round(self, tokens: Sequence[int], k: int, model_k: int | None = None) -> tuple[Draft, Verdict]:
        """Returns the verdict on the round that extends `tokens`: one in flight already, or a new one of `k` drafts."""
        self._k, self._model_k = k, model_k
        if not self._flights and not (self._ahead and await self._ahead_sent()):
            self._path = list(tokens)
            self._send(await self._drafted() if k else Draft(), ahead=False)
        stale = 0
        while True:
            try:
                answer = await self._first_answer()
            except RoundsLost as lost:
                error = lost.cause
            else:
                if answer.verdict is not None:
                    flight = self._flights.popleft()
                    if not self._follows(tokens, flight, answer.verdict, answer.network_seconds):
                        await self._drop_in_flight()
                    return flight.draft, answer.verdict
                held = answer.committed_length
                error = OutOfStep(f"round at {len(tokens)} is stale: the verifier holds {held} tokens")
                stale += 1
                if stale == ATTEMPTS:
                    raise error
            again = self._flights.popleft()
            await self._drop_in_flight()
            await self.verifier.resume(tokens, error)
            self._path = list(tokens)
            self._send(again.draft, ahead=False)

    async def close(self) -> None:
        try:
            await self._drop_in_flight()
            await self.drafter.close()
        finally:
            await self.verifier.close()

    async def _first_answer(self) -> Answer:
        """Waits for the answer to the oldest round in flight; meanwhile drafts ahead as far as it pays and may go."""
        answer = self._flights[0].answer
        while not answer.done():
            deepest = self.depth.of(self._k)
            room = len(self._path) + 1 < self._end
            if self._ahead is None and not self._no_bonus and room and len(self._flights) < deepest:
                self._ahead = asyncio.create_task(self._draft_ahead(), name="draft ahead")
            if self._ahead is None:
                return await answer
            either: list[asyncio.Future[Any]] = [answer, self._ahead]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._ahead.done():
                await self._ahead_sent()
        return answer.result()

    async def _draft_ahead(self) -> bool:
        """Drafts the bonus token of the last round in flight and a round after it, and sends that.

        Returns False if no bonus token was drafted.
        """
        bonus = await self._drafted(bonus=True)
        self.stats.spent(bonus)
        if not bonus.token_ids:
            return False
        self._path += bonus.token_ids
        self._send(await self._drafted(), ahead=True)
        return True

    async def _ahead_sent(self) -> bool:
        """Waits for the round that is being drafted. Raises what the drafter raises."""
        assert self._ahead is not None
        sent = await self._ahead
        self._ahead, self._no_bonus = None, not sent
        return sent

    async def _drafted(self, bonus: bool = False) -> Draft:
        """Drafts what follows the path: a round, or its bonus token."""
        began, path = self.clock(), self._path
        if bonus:
            draft = await self.drafter.draft_bonus(path)
        else:
            draft = await self.drafter.propose(path, min(self._k, self._end - len(path) - 1), self._model_k)
        self.depth.estimate.drafted(len(draft.token_ids), self.clock() - began)
        return draft

    def _send(self, draft: Draft, ahead: bool) -> None:
        """Sends a round that extends the path."""
        self.stats.sent(len(self._flights))
        answer = self.verifier.send(len(self._path), self._path[-1], draft)
        self._flights.append(_Flight(draft, answer, self.clock(), ahead))
        self._path += draft.token_ids

    def _follows(self, tokens: Sequence[int], flight: _Flight, verdict: Verdict, network_seconds: float) -> bool:
        """Records a verdict; returns whether it matches the path, so that the rounds in flight after it continue.

        Counts as network time only waiting that nothing else explains: overlapping rounds do not wait twice.
        """
        now, beside_target = self.clock(), verdict.queue_seconds + verdict.compute_seconds
        waited = now - max(flight.sent, self._answered) - beside_target
        self._answered = now
        self.stats.network_seconds += min(network_seconds, max(0.0, waited))
        self.stats.guessed_rounds += flight.ahead
        self.depth.estimate.verified(beside_target, network_seconds)
        committed = [*tokens, *verdict.token_ids]
        matches = self._path[: len(committed)] == committed
        self._no_bonus = False
        return matches or not (self._flights or self._ahead)

    async def _drop_in_flight(self) -> None:
        """Drops all rounds in flight and the one being drafted, which are stale."""
        if self._ahead:
            self._ahead.cancel()
            await asyncio.gather(self._ahead, return_exceptions=True)
            self._ahead = None
        for flight in self._flights:
            self.stats.stale(flight.draft, flight.ahead)
            flight.answer.cancel()
        self._flights.clear()
