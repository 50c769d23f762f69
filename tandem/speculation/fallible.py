"""Handles drafters that fail: rounds are decoded without a draft, with the same tokens, until the drafter recovers.

Only the first call that fails delays a round. From then on trial calls are made, at growing intervals.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

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


class DrafterHealth:
    """What the requests of a process know together about one drafter. Says each change once."""

    def __init__(self, name: str, backoff: Backoff | None = None) -> None:
        self.name, self.backoff = name, backoff or Backoff()
        self.undrafted = self.failures = 0

    @property
    def up(self) -> bool:
        return self.backoff.up

    def failed(self, error: Exception, trial: bool = False) -> None:
        self.failures += 1
        if self.backoff.failed(trial):
            reason = " ".join(f"{error}".split()) or type(error).__name__
            log.warning(
                "drafter %s failed (%s): decoding plainly, next trial in %.0f s",
                self.name,
                reason,
                self.backoff.wait_seconds,
            )

    def succeeded(self) -> None:
        down = self.backoff.seconds
        if self.backoff.succeeded():
            log.info(
                "drafter %s is back after %.1f s; %d rounds went undrafted so far", self.name, down, self.undrafted
            )


class FallibleDrafter:
    """Another drafter's proposals for one request, or none for as long as it fails. Raises nothing.

    How long a call may take is the other drafter's to bound. `refusals`: exceptions that are about this request alone.
    Rounds that went undrafted are counted into `stats`.
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
        self._refusals, self._backoff = refusals, backoff or Backoff()  # of this request alone
        self._sampling = SamplingParams()
        self._opened = False
        self._trial: asyncio.Task[Draft | None] | None = None

    async def open(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        self._sampling = sampling
        if self._health.up:
            await self._attempt(prompt, _nothing)

    async def propose(self, tokens: Sequence[int], k: int) -> Draft:
        draft = await self._asked(tokens, (lambda known: self._drafter.propose(known, k)) if k else _nothing)
        self._health.undrafted += draft is None
        self._stats.undrafted_rounds += draft is None
        return draft or Draft()

    def learn(self, tokens: Sequence[int]) -> None:
        teach(self._drafter, tokens)

    async def close(self) -> None:
        if self._trial:
            self._trial.cancel()
            await asyncio.gather(self._trial, return_exceptions=True)
        await self._drafter.close()

    async def _asked(self, tokens: Sequence[int], call: _Call) -> Draft | None:
        if self._trial and not self._trial.done():
            return None  # one call at a time
        if self._health.up and self._backoff.up:
            return await self._attempt(tokens, call)
        if self._trial_is_due():
            # Beside the rounds: it brings the drafter up to date, its proposal comes too late for any.
            self._trial = asyncio.create_task(self._attempt(list(tokens), call, trial=True), name="drafter trial")
        return None

    def _trial_is_due(self) -> bool:
        return (self._health.up or self._health.backoff.due()) and (self._backoff.up or self._backoff.due())

    async def _attempt(self, tokens: Sequence[int], call: _Call, trial: bool = False) -> Draft | None:
        try:
            if not self._opened:
                await self._drafter.close()  # what an opening that failed may hold
                await self._drafter.open(tokens, self._sampling)
                self._opened = True
            draft = await call(tokens)
        except DrafterLate:
            self._backoff.failed(trial)
            return None
        except self._refusals as error:
            self._health.succeeded()  # it answers
            if self._backoff.failed(trial):
                log.debug("drafter %s refused a request: %s", self._health.name, error)
            return None
        except Exception as error:  # whatever it is: a drafter never ends a request
            self._health.failed(error, trial)
            return None
        self._backoff.succeeded()
        self._health.succeeded()
        return draft


class FallibleBonusDrafter(FallibleDrafter):
    """Likewise for a drafter that guesses; a guess that fails is none."""

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
        return await self._asked(tokens, self._bonus_drafter.draft_bonus) or Draft()


_Call = Callable[[Sequence[int]], Awaitable[Draft]]


async def _nothing(tokens: Sequence[int]) -> Draft:
    return Draft()
