"""The loop's rounds with several in flight: while verdicts travel, the draft goes on from a guess of the bonus token.

A round is [last token, d1..dk]. Accepted whole it commits one token more, the bonus. The draft guesses that token (with
the noise of the target's own draw), drafts k more behind it and sends them as a round of their own, and so on. Where
a guess or a draft token was wrong, whatever was sent after it is stale: the verifier answers without computing, and the
draft starts again from what was committed. No verdict depends on any of this, so no token does.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tandem.speculation.depth import Depth
from tandem.speculation.drafters import Guesser, teach
from tandem.speculation.types import Draft, SamplingParams, SpeculationStats, Verdict

MOST_IN_FLIGHT = 8
ATTEMPTS = 3
"""Times that one round may be stale at a session that was brought in step before, until the request fails."""


class RoundsLost(Exception):
    """What was in flight is lost and the session with it, as far as one knows. `cause`: what to say if it stays so."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class OutOfStep(RuntimeError):
    """The verifier holds other tokens than were committed, and opening the session again did not help."""


@dataclass(frozen=True, slots=True)
class Answer:
    """To one round; no verdict: it was stale. `network_seconds` are those not spent beside the target."""

    verdict: Verdict | None
    committed_length: int
    network_seconds: float = 0.0


class FlightVerifier(Protocol):
    """The target, for one request, that several rounds may be under way to. It answers in order."""

    @property
    def most_in_flight(self) -> int:
        """Rounds that may be unanswered, now."""

    async def open(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        """Takes a KV slot and processes the prompt."""

    def send(self, base_length: int, last_token: int, draft: Draft) -> asyncio.Future[Answer]:
        """A round that extends `base_length` tokens ending in `last_token`. The answer may be RoundsLost."""

    async def resume(self, tokens: Sequence[int], cause: Exception) -> None:
        """After RoundsLost (or OutOfStep) with this `cause`: goes on from `tokens`, all committed.

        Raises where it has tried enough.
        """

    async def close(self) -> None:
        """Frees the slot. May be called at any time, and again."""


@dataclass(slots=True)
class _Flight:
    """A round under way: what it carries, and when it left. `ahead`: sent on a guess."""

    draft: Draft
    answer: asyncio.Future[Answer]
    sent: float
    ahead: bool


@dataclass(slots=True)
class PipelinedRounds:
    """`most_total` and `most_new` bound the tokens, prompt included and not: nothing is drafted beyond them."""

    verifier: FlightVerifier
    drafter: Guesser
    depth: Depth
    stats: SpeculationStats
    most_total: int
    most_new: int | None = None
    clock: Callable[[], float] = time.perf_counter
    _end: int = 0
    _path: list[int] = field(default_factory=list)  # the tokens committed, and those assumed by what is in flight
    _flights: deque[_Flight] = field(default_factory=deque)
    _ahead: asyncio.Task[bool] | None = None  # drafts and sends one round; False: it had no guess
    _dry: bool = False  # nothing to guess with until there is a verdict
    _k: int = 0
    _answered: float = 0.0

    async def open(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        await self.verifier.open(prompt, sampling)
        await self.drafter.open(prompt, sampling)
        self._end = self.most_total if self.most_new is None else min(self.most_total, len(prompt) + self.most_new)

    async def round(self, tokens: Sequence[int], k: int) -> tuple[Draft, Verdict]:
        """The verdict on what extends `tokens`: a round that is in flight already, or one of `k` drafts."""
        self._k = k
        if not self._flights:
            await self._landed_or_first(tokens)
        stale = 0
        while True:
            try:
                answer = await self._first_answer()
            except RoundsLost as lost:
                error = lost.cause
            else:
                if answer.verdict is not None:
                    return await self._committed(
                        tokens, self._flights.popleft(), answer.verdict, answer.network_seconds
                    )
                held = answer.committed_length
                error = OutOfStep(f"round at {len(tokens)} is stale: the verifier holds {held} tokens")
                stale += 1
                if stale == ATTEMPTS:
                    raise error
            again = self._flights.popleft()
            await self._forget_ahead()
            await self.verifier.resume(tokens, error)
            self._path = list(tokens)
            self._send(again.draft, ahead=False)

    def learn(self, tokens: Sequence[int]) -> None:
        teach(self.drafter, tokens)

    async def close(self) -> None:
        try:
            await self._forget_ahead()
            await self.drafter.close()
        finally:
            await self.verifier.close()

    async def _landed_or_first(self, tokens: Sequence[int]) -> None:
        """With nothing in flight: the round being drafted on a guess that came true, or one from `tokens`."""
        if self._ahead and await self._ahead_sent():
            return
        draft = await self._propose(tokens) if self._k else Draft()
        self._path = list(tokens)
        self._send(draft, ahead=False)

    async def _first_answer(self) -> Answer:
        """Of the oldest round in flight; meanwhile the draft goes on as far as it pays."""
        answer = self._flights[0].answer
        while not answer.done():
            self._go_ahead()
            if self._ahead is None:
                return await answer
            either: list[asyncio.Future[Any]] = [answer, self._ahead]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._ahead.done():
                await self._ahead_sent()
        return answer.result()

    def _go_ahead(self) -> None:
        deepest = min(self.depth.of(self._k), self.verifier.most_in_flight)
        room = len(self._path) + 1 < self._end
        if self._ahead is None and not self._dry and room and len(self._flights) < deepest:
            self._ahead = asyncio.create_task(self._draft_ahead(), name="draft ahead")

    async def _draft_ahead(self) -> bool:
        """Guesses the bonus token of the last round in flight, drafts behind it and sends that. False: no guess."""
        guess = await self._timed(self.drafter.guess(self._path))
        self.stats.spent(guess)
        if not guess.token_ids:
            return False
        self._path += guess.token_ids
        self._send(await self._propose(self._path), ahead=True)
        return True

    async def _ahead_sent(self) -> bool:
        """Waits for the round that is being drafted. Raises what its drafter did."""
        assert self._ahead is not None
        sent = await self._ahead
        self._ahead, self._dry = None, not sent
        return sent

    async def _propose(self, tokens: Sequence[int]) -> Draft:
        return await self._timed(self.drafter.propose(tokens, min(self._k, self._end - len(tokens) - 1)))

    async def _timed(self, drafting: Awaitable[Draft]) -> Draft:
        began = self.clock()
        draft = await drafting
        self.depth.times.drafted(len(draft.token_ids), self.clock() - began)
        return draft

    def _send(self, draft: Draft, ahead: bool) -> None:
        """A round that extends the path."""
        self.stats.sent(len(self._flights))
        answer = self.verifier.send(len(self._path), self._path[-1], draft)
        self._flights.append(_Flight(draft, answer, self.clock(), ahead))
        self._path += draft.token_ids

    async def _committed(
        self, tokens: Sequence[int], flight: _Flight, verdict: Verdict, network_seconds: float
    ) -> tuple[Draft, Verdict]:
        """Takes a verdict in: what is in flight beyond it goes on, or is forgotten."""
        self._account(flight, verdict, network_seconds)
        committed, drafted = [*tokens, *verdict.token_ids], len(flight.draft.token_ids)
        goes_on = self._path[: len(committed)] == committed
        guessed = goes_on if len(self._path) >= len(committed) else None
        self.depth.rates.observe(drafted, verdict.accepted, guessed)
        self._dry = False
        if not goes_on:
            await self._forget_ahead()
        return flight.draft, verdict

    def _account(self, flight: _Flight, verdict: Verdict, network_seconds: float) -> None:
        """Only waiting that nothing else explains is the network's: rounds that overlap do not wait twice."""
        now, beside_target = self.clock(), verdict.queue_seconds + verdict.compute_seconds
        waited = now - max(flight.sent, self._answered) - beside_target
        self._answered = now
        self.stats.network_seconds += min(network_seconds, max(0.0, waited))
        self.stats.guessed_rounds += flight.ahead
        self.depth.times.verified(beside_target, network_seconds)

    async def _forget_ahead(self) -> None:
        """Everything in flight is stale; so is what is being drafted."""
        if self._ahead:
            self._ahead.cancel()
            await asyncio.gather(self._ahead, return_exceptions=True)
            self._ahead = None
        for flight in self._flights:
            self.stats.stale(flight.draft, flight.ahead)
            flight.answer.cancel()
        self._flights.clear()
