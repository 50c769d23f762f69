"""Drafters that fail: rounds go on undrafted, with the same tokens, and trials at growing intervals end that."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tandem.speculation.drafters import Drafter
from tandem.speculation.retry import Backoff
from tandem.speculation.types import Draft, SpeculationStats

log = logging.getLogger("tandem.drafter")


class DrafterRefused(RuntimeError):
    """A drafter refuses this request (full, or text too long) but may serve others."""


class DrafterLate(RuntimeError):
    """A drafter missed a deadline too short to prove a failure."""


@dataclass(slots=True)
class Attempt:
    """A drafter's call, whose outcome must be reported. `trial`: tests whether a failed drafter is back."""

    health: DrafterHealth
    trial: bool = False
    _open: bool = True

    def failed(self, error: Exception) -> None:
        self._open = False
        self.health.failed(error, self.trial)

    def succeeded(self) -> None:
        self._open = False
        if not self.health.backoff.up:
            self.health.succeeded()

    def refused(self, backoff: Backoff, reason: object) -> None:
        """Reports a refusal, which is an answer, to the request with this `backoff`."""
        self.succeeded()
        if backoff.failed(trial=not backoff.up):
            log.debug("drafter %s refused a request: %s", self.health.name, reason)

    def ended(self) -> None:
        """Ends a trial without outcome, so that another may soon follow; no effect after a report."""
        if self.trial and self._open:
            self.health.backoff.given_up()
        self._open = False


class DrafterHealth:
    """The health of one drafter, shared by a process's requests; logs each change once."""

    def __init__(self, name: str, backoff: Backoff | None = None) -> None:
        self.name, self.backoff = name, backoff or Backoff()
        self.undrafted = self.failures = 0

    @property
    def up(self) -> bool:
        return self.backoff.up

    def attempt(self, own: Backoff | None = None) -> Attempt | None:
        """Returns a call, a trial if one is due, or None. A request that waits by its `own` backoff takes no trial."""
        if own and not own.up and not own.ready():
            return None
        if self.backoff.up:
            return Attempt(self)
        return Attempt(self, trial=True) if self.backoff.due() else None

    def skipped(self, stats: SpeculationStats) -> None:
        """Counts an undrafted round, here and in its request's statistics."""
        self.undrafted += 1
        stats.undrafted_rounds += 1

    def failed(self, error: Exception, trial: bool = False) -> None:
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
        down = self.backoff.succeeded()
        if down is not None:
            log.info(
                "drafter %s is back after %.1f s; %d rounds went undrafted so far", self.name, down, self.undrafted
            )


class FallibleDrafter(Drafter):
    """One request's drafter, with bounded calls: proposes nothing while it fails or refuses, and never raises."""

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
        self._opened = False
        self._trial: asyncio.Task[Draft] | None = None

    async def open(self, prompt: Sequence[int]) -> None:
        if self._health.up:
            await self._draft(prompt, _nothing, attempt=Attempt(self._health))

    def propose(self, tokens: Sequence[int], k: int, model_k: int | None = None) -> Coroutine[Any, Any, Draft]:
        call = partial(self._drafter.propose, k=k, model_k=model_k) if k else _nothing
        return self._draft(tokens, call, counts=True)

    def draft_bonus(self, tokens: Sequence[int]) -> Coroutine[Any, Any, Draft]:
        return self._draft(tokens, self._drafter.draft_bonus)

    async def close(self) -> None:
        if self._trial:
            self._trial.cancel()
            await asyncio.gather(self._trial, return_exceptions=True)
        self._opened = False
        await self._drafter.close()

    def _attempt(self, tokens: Sequence[int], call: _Call) -> Attempt | None:
        """Returns the attempt to make now, or starts a due trial in the background."""
        if self._trial and not self._trial.done():
            return None  # one call at a time
        attempt = self._health.attempt(self._backoff)
        if attempt is None or (self._backoff.up and not attempt.trial):
            return attempt
        # A trial runs beside the rounds and brings the drafter up to date; its proposal comes too late to be used.
        self._trial = asyncio.create_task(self._draft(list(tokens), call, attempt=attempt), name="drafter trial")
        self._trial.add_done_callback(lambda _: attempt.ended())
        return None

    async def _draft(
        self, tokens: Sequence[int], call: _Call, counts: bool = False, attempt: Attempt | None = None
    ) -> Draft:
        """Drafts if an attempt may be made, and reports its outcome. `counts`: a failure is an undrafted round."""
        draft = None
        if attempt := attempt or self._attempt(tokens, call):
            try:
                if not self._opened:
                    await self._drafter.close()  # frees what a failed `open` may hold
                    await self._drafter.open(tokens)
                    self._opened = True
                draft = await call(tokens)
                self._backoff.succeeded()
                attempt.succeeded()
            except DrafterLate:
                self._backoff.failed(trial=not self._backoff.up)
            except self._refusals as error:
                attempt.refused(self._backoff, error)
            except Exception as error:  # no error of a drafter may end a request
                attempt.failed(error)
        if draft is None and counts:
            self._health.skipped(self._stats)
        return draft or Draft()


_Call = Callable[[Sequence[int]], Awaitable[Draft]]


async def _nothing(tokens: Sequence[int]) -> Draft:
    return Draft()
