"""Handles drafters that fail: rounds are decoded without a draft, with the same tokens, until the drafter recovers.

Only the first call that fails delays a round. From then on trial calls are made, at growing intervals.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tandem.speculation.drafters import BonusDrafter, Drafter, teach
from tandem.speculation.types import Draft, SamplingParams, SpeculationStats

log = logging.getLogger("tandem.drafter")

FIRST_SECONDS, LONGEST_SECONDS = 1.0, 30.0


class DrafterRefused(RuntimeError):
    """A drafter refuses this request (it is full, or the text is too long) but may serve others."""


class DrafterLate(RuntimeError):
    """A drafter missed a deadline that was too short to conclude that it has failed."""


class Backoff:
    """Schedules trials after a failure: the first after `first` seconds, then doubling the wait up to `longest`.

    A failure soon after a success does not reset the wait: it keeps growing.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        first: float = FIRST_SECONDS,
        longest: float = LONGEST_SECONDS,
    ) -> None:
        self._clock, self._first, self._longest = clock, first, longest
        self._wait = 0.0
        self._changed = -longest
        self._next_trial = 0.0
        self.up = True

    @property
    def wait_seconds(self) -> float:
        return self._wait

    @property
    def seconds(self) -> float:
        """Seconds since it last went up or down."""
        return self._clock() - self._changed

    def due(self) -> bool:
        """Returns True to one caller per wait period, which must then make the trial."""
        if self.up or self._clock() < self._next_trial:
            return False
        self._next_trial = self._clock() + self._wait
        return True

    def failed(self, trial: bool = False) -> bool:
        """Records a failure.

        Returns True if the state changes. Calls already under way at the first failure are ignored.
        """
        if not self.up and not trial:
            return False
        changed, again = self.up, trial or self.seconds < self._longest
        self._wait = min(2 * self._wait, self._longest) if again and self._wait else self._first
        if changed:
            self.up, self._changed = False, self._clock()
        self._next_trial = self._clock() + self._wait
        return changed

    def succeeded(self) -> bool:
        """Records a success; returns True if the state changes."""
        changed = not self.up
        if changed:
            self.up, self._changed = True, self._clock()
        return changed


@dataclass(frozen=True, slots=True)
class Attempt:
    """A call of a drafter, whose outcome must be reported. `trial`: made to find out whether the drafter is back."""

    health: DrafterHealth
    trial: bool = False

    def failed(self, error: Exception) -> None:
        """Reports that the call failed."""
        self.health.failed(error, self.trial)

    def succeeded(self) -> None:
        """Reports that the drafter answered."""
        self.health.succeeded()


class DrafterHealth:
    """The health of one drafter, shared by the requests of a process. Logs each change once."""

    def __init__(self, name: str, backoff: Backoff | None = None) -> None:
        self.name, self.backoff = name, backoff or Backoff()
        self.undrafted = self.failures = 0

    @property
    def up(self) -> bool:
        return self.backoff.up

    def attempt(self) -> Attempt | None:
        """Returns the attempt that may be made now: a call if the drafter is up, a trial if one is due, or None."""
        if self.up:
            return Attempt(self)
        return Attempt(self, trial=True) if self.backoff.due() else None

    def skipped(self, stats: SpeculationStats) -> None:
        """Counts a round that went undrafted, here and in the statistics of its request."""
        self.undrafted += 1
        stats.undrafted_rounds += 1

    def failed(self, error: Exception, trial: bool = False) -> None:
        """Records that a call failed."""
        self.failures += 1
        if self.backoff.failed(trial):
            reason = " ".join(f"{error}".split()) or type(error).__name__
            log.warning(
                "drafter %s failed (%s): decoding without drafts, next trial in %.0f s",
                self.name,
                reason,
                self.backoff.wait_seconds,
            )

    def succeeded(self) -> None:
        """Records that a call was answered."""
        down = self.backoff.seconds
        if self.backoff.succeeded():
            log.info(
                "drafter %s is back after %.1f s; %d rounds went undrafted so far", self.name, down, self.undrafted
            )


class FallibleDrafter:
    """Wraps a drafter for one request: proposes nothing for as long as it fails, and raises no exceptions.

    The wrapped drafter must limit the time of its calls. `refusals`: exceptions that concern only this request, which
    has its own `backoff` for them. Rounds that go undrafted are counted in `stats`.
    """

    def __init__(
        self,
        drafter: Drafter,
        health: DrafterHealth,
        backoff: Backoff | None = None,
        stats: SpeculationStats | None = None,
        refusals: tuple[type[Exception], ...] = (DrafterRefused,),
    ) -> None:
        self._drafter, self._health = drafter, health
        self._stats = stats if stats is not None else SpeculationStats()
        self._refusals, self._backoff = refusals, backoff or Backoff()
        self._sampling = SamplingParams()
        self._opened = False
        self._trial: asyncio.Task[Draft | None] | None = None

    async def open(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        self._sampling = sampling
        if self._health.up:
            await self._call(prompt, _nothing, Attempt(self._health))

    async def propose(self, tokens: Sequence[int], k: int, model_k: int | None = None) -> Draft:
        draft = await self._try(tokens, (lambda known: self._drafter.propose(known, k, model_k)) if k else _nothing)
        if draft is None:
            self._health.skipped(self._stats)
        return draft or Draft()

    def learn(self, tokens: Sequence[int]) -> None:
        teach(self._drafter, tokens)

    async def close(self) -> None:
        if self._trial:
            self._trial.cancel()
            await asyncio.gather(self._trial, return_exceptions=True)
        self._opened = False
        await self._drafter.close()

    async def _try(self, tokens: Sequence[int], call: _Call) -> Draft | None:
        """Calls the drafter if it is up; otherwise begins a trial if one is due, and returns None."""
        if self._trial and not self._trial.done():
            return None  # one call at a time
        attempt = self._health.attempt()
        if attempt is None or not (self._backoff.up or self._backoff.due()):
            return None
        if self._backoff.up and not attempt.trial:
            return await self._call(tokens, call, attempt)
        # A trial runs beside the rounds and brings the drafter up to date; its proposal comes too late to be used.
        trial = Attempt(self._health, trial=True)
        self._trial = asyncio.create_task(self._call(list(tokens), call, trial), name="drafter trial")
        return None

    async def _call(self, tokens: Sequence[int], call: _Call, attempt: Attempt) -> Draft | None:
        """Makes the attempt and reports its outcome. Returns None if it fails."""
        try:
            if not self._opened:
                await self._drafter.close()  # frees what a failed `open` may hold
                await self._drafter.open(tokens, self._sampling)
                self._opened = True
            draft = await call(tokens)
        except DrafterLate:
            self._backoff.failed(attempt.trial)
            return None
        except self._refusals as error:
            attempt.succeeded()  # a refusal is an answer
            if self._backoff.failed(attempt.trial):
                log.debug("drafter %s refused a request: %s", self._health.name, error)
            return None
        except Exception as error:  # no error of a drafter may end a request
            attempt.failed(error)
            return None
        self._backoff.succeeded()
        attempt.succeeded()
        return draft


class FallibleBonusDrafter(FallibleDrafter):
    """A FallibleDrafter that also drafts bonus tokens; if that fails, there is none."""

    def __init__(
        self,
        drafter: BonusDrafter,
        health: DrafterHealth,
        stats: SpeculationStats | None = None,
        refusals: tuple[type[Exception], ...] = (DrafterRefused,),
    ) -> None:
        super().__init__(drafter, health, None, stats, refusals)
        self._bonus_drafter = drafter

    async def draft_bonus(self, tokens: Sequence[int]) -> Draft:
        return await self._try(tokens, self._bonus_drafter.draft_bonus) or Draft()


_Call = Callable[[Sequence[int]], Awaitable[Draft]]


async def _nothing(tokens: Sequence[int]) -> Draft:
    return Draft()
