"""Drafters that fail: rounds go on undrafted, with the same tokens, and trials at growing intervals end that."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from tandem.speculation.drafters import Drafter
from tandem.speculation.retry import Backoff
from tandem.speculation.types import Draft, LengthPlan, SpeculationStats

log = logging.getLogger("tandem.drafter")


class DrafterRefused(RuntimeError):
    """A drafter refuses this request (full, or text too long) but may serve others."""


class DrafterLate(RuntimeError):
    """A drafter missed a deadline too short to prove a failure."""


class DrafterHealth:
    """The health of one drafter, shared by a process's requests; logs each change once.

    A call that `attempt` allows must be reported: `failed`, `succeeded`, `refused`, or else `ended`.
    """

    def __init__(self, name: str, backoff: Backoff | None = None) -> None:
        self.name, self.backoff = name, backoff or Backoff()
        self.undrafted = self.failures = 0

    @property
    def up(self) -> bool:
        return self.backoff.up

    def attempt(self, own: Backoff | None = None) -> bool:
        """Whether to call: the drafter is up, or a trial is due. A request waits by its `own` backoff."""
        return not (own and not own.ready()) and (self.backoff.up or self.backoff.due())

    def skipped(self, stats: SpeculationStats) -> None:
        """Counts an undrafted round, here and in its request's statistics."""
        self.undrafted += 1
        stats.undrafted_rounds += 1

    def failed(self, error: Exception) -> None:
        self.failures += 1
        if self.backoff.failed():
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

    def refused(self, backoff: Backoff, reason: object) -> None:
        """Reports a refusal, which is an answer, to the request with this `backoff`."""
        self.succeeded()
        if backoff.refused():
            log.debug("drafter %s refused a request: %s", self.name, reason)

    def ended(self) -> None:
        """Ends a call without outcome; if it was a trial, another may soon follow. No effect after a report."""
        self.backoff.given_up()


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
            await self._draft(prompt, _nothing, allowed=True)

    def propose(self, tokens: Sequence[int], plan: LengthPlan) -> Coroutine[Any, Any, Draft]:
        call = partial(self._drafter.propose, plan=plan) if plan.k else _nothing
        return self._draft(tokens, call, counts=True)

    def draft_bonus(self, tokens: Sequence[int]) -> Coroutine[Any, Any, Draft]:
        return self._draft(tokens, self._drafter.draft_bonus)

    async def close(self) -> None:
        if self._trial:
            self._trial.cancel()
            await asyncio.gather(self._trial, return_exceptions=True)
        self._opened = False
        await self._drafter.close()

    def _may_call(self, tokens: Sequence[int], call: _Call) -> bool:
        """Returns whether to call now; starts a due trial in the background."""
        if self._trial and not self._trial.done():
            return False  # one call at a time
        up = self._backoff.up and self._health.up
        if not self._health.attempt(self._backoff) or up:
            return up
        # A trial runs beside the rounds and brings the drafter up to date; its proposal comes too late to be used.
        self._trial = asyncio.create_task(self._draft(list(tokens), call, allowed=True), name="drafter trial")
        self._trial.add_done_callback(lambda _: self._health.ended())
        return False

    async def _draft(self, tokens: Sequence[int], call: _Call, counts: bool = False, allowed: bool = False) -> Draft:
        """Drafts if a call is allowed, and reports its outcome. `counts`: a failure is an undrafted round."""
        draft = None
        if allowed or self._may_call(tokens, call):
            try:
                if not self._opened:
                    await self._drafter.close()  # frees what a failed `open` may hold
                    await self._drafter.open(tokens)
                    self._opened = True
                draft = await call(tokens)
                self._backoff.succeeded()
                self._health.succeeded()
            except DrafterLate:
                self._backoff.refused()
            except self._refusals as error:
                self._health.refused(self._backoff, error)
            except Exception as error:  # no error of a drafter may end a request
                self._health.failed(error)
        if draft is None and counts:
            self._health.skipped(self._stats)
        return draft or Draft()


_Call = Callable[[Sequence[int]], Awaitable[Draft]]


async def _nothing(tokens: Sequence[int]) -> Draft:
    return Draft()
