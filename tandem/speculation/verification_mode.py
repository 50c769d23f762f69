"""Chooses between the ways to verify at a distance: stop-and-wait, pipelined, or a target that never waits.

Each way's time per token follows from measured times and acceptance, and is held against what the way then takes. A
target that never waits steps more often per token; where other sessions share its steps, that is charged with the time
that a row costs them, so that under load the ways that wait are chosen.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tandem.speculation.depth import Pipeline, expected_tpot
from tandem.speculation.lookahead import LookaheadPolicy, RunMeasurements
from tandem.speculation.loop import Rounds
from tandem.speculation.never_waiting_theory import HIGHEST_RATE, MIN_STEP, Cost, running_costs
from tandem.speculation.round_statistics import ANY_ROWS
from tandem.speculation.step_times import Times
from tandem.speculation.theory import expected_tokens
from tandem.speculation.types import Draft, Verdict

NEAR_SECONDS = 0.005
"""Until the costs are known, a round trip below this is waited for."""
RECONSIDERED = 16
"""Rounds of a request after which its way is chosen anew."""
CLEAR_GAIN = 1.1
"""How much faster another way must be expected to serve for a request to change to it: that costs a round trip."""
LEAST_TIMED = 8
"""The fewest tokens whose rounds are reported as timed."""


def waiting_costs(times: Times, rate: float, table: Sequence[float], most_in_flight: int) -> list[Cost]:
    """Returns the costs of rounds that are waited for, by draft length and by the number of rounds in flight."""
    costs = []
    for k in range(len(table)):
        tokens, here = expected_tokens(rate, k), Times(times.draft, table[k], times.rtt)
        for depth in range(1, most_in_flight + 1 if k else 2):
            costs.append(Cost(expected_tpot(depth, here, k, (rate,) * (k + 1)), 1 / tokens, k))
    return costs


class Expected(NamedTuple):
    """What is expected of the two ways: `waiting` and `running` in seconds per token, at the best draft lengths.

    `gain`: how much faster the target that never waits serves, what shares its steps included.
    """

    waiting: float
    running: float
    gain: float


def expectation(measured: RunMeasurements, acceptance: float, most: int, most_in_flight: int) -> Expected | None:
    """Returns what is expected with drafts of at most `most` >= 1 tokens, or None until the costs are measured."""
    known = measured.times.known
    if known is None or not measured.steps.steps:
        return None
    return _expected(
        Times(*(float(f"{seconds:.2g}") for seconds in (known.draft, known.verify, known.rtt))),
        round(min(acceptance, HIGHEST_RATE), 2),
        tuple(float(f"{seconds:.2g}") for seconds in measured.steps.table(ANY_ROWS, most + 1, round(measured.others))),
        round(max(0.0, measured.rows - 1), 1),
        most_in_flight,
    )


@functools.lru_cache(maxsize=256)
def _expected(times: Times, rate: float, around: tuple[float, ...], company: float, most_in_flight: int) -> Expected:
    """See `expectation`. `around[n]`: seconds of a step with n tokens of ours, beside those of others."""
    table = around[1:]

    def added(cost: Cost) -> float:
        """Returns the tokens per second that a way adds, less those that it takes from rows that share its steps."""
        lost = company * cost.steps * (table[cost.width] - around[0]) / table[0] if company else 0.0
        return (1 - lost) / cost.seconds

    waiting = max(waiting_costs(times, rate, table, most_in_flight), key=added)
    running = max(running_costs(times, rate, table), key=added)
    best = added(waiting)
    gain = added(running) / best if best > 0 else (math.inf if added(running) > 0 else 0.0)
    return Expected(waiting.seconds, running.seconds, gain)


@dataclass(slots=True)
class ModeChoice:
    """Chooses the way of one request, by what the requests of its process measured.

    The ways that wait have at most `most_in_flight` rounds under way. Only with Pipeline.AUTO is there a choice.
    """

    reach: LookaheadPolicy
    most_in_flight: int
    pipeline: Pipeline = Pipeline.AUTO

    def runs(self, running: bool | None, opening_rtt: float = 0.0) -> bool:
        """Returns whether a target that never waits is expected to serve best.

        `running`: whether it runs now, which is changed only for a clear gain; None: nothing was begun.
        """
        if self.pipeline is Pipeline.NEVER_WAITING or self.reach.most == 0:
            return True  # no choice; plain decoding saves every round trip
        expected = self._expected()
        if expected is None:
            return opening_rtt >= NEAR_SECONDS if running is None else running
        measured = self.reach.measured
        gain = expected.gain * measured.waiting.value / measured.running.value
        if running is None:
            return gain > 1
        return gain > 1 / CLEAR_GAIN if running else gain > CLEAR_GAIN

    def took(self, running: bool, tokens: int, seconds: float) -> None:
        """Records how long some rounds of a way took, and the tokens that they committed."""
        expected = self._expected() if self.pipeline is Pipeline.AUTO and self.reach.most else None
        if expected is not None and tokens:
            waits, runs = self.reach.measured.waiting, self.reach.measured.running
            each, way = (expected.running, runs) if running else (expected.waiting, waits)
            waits.fade(tokens)
            runs.fade(tokens)
            way.note(tokens, seconds / tokens / max(each, MIN_STEP))

    def _expected(self) -> Expected | None:
        return expectation(self.reach.measured, self.reach.acceptance, self.reach.most, self.most_in_flight)


class VerificationMode(Rounds, Protocol):
    """Rounds that can be taken over between two of them, at the same open session and with the same drafter."""

    async def resume(self, prompt: Sequence[int]) -> None:
        """Goes on with a session and a drafter that are open."""

    async def suspend(self, tokens: Sequence[int]) -> None:
        """Drops what is in flight, so that the session holds `tokens`, which are all that is committed."""


@dataclass(slots=True)
class ChosenRounds:
    """Rounds of one of two ways at the same session, chosen anew after every RECONSIDERED rounds.

    `opens` opens the session, and returns whether the target runs already. `runs` says which way to go: it is told
    whether the target runs now, or None at first. `took` is told how long the rounds since took: whether the target
    ran, the tokens, and the seconds.
    """

    opens: Callable[[Sequence[int]], Awaitable[bool | None]]
    runs: Callable[[bool | None], bool]
    took: Callable[[bool, int, float], None]
    waiting: VerificationMode
    running: VerificationMode
    reach: LookaheadPolicy
    measures_steps: bool = False
    """The rounds that wait do not record how long steps take."""
    clock: Callable[[], float] = time.perf_counter
    _since: float | None = None  # when the first of the rounds that are timed together ended
    _until: float = 0.0  # when the last one did
    _tokens: int = 0  # that were committed after the first one
    _chosen: VerificationMode | None = None
    _rounds: int = 0
    _prompt: Sequence[int] = ()

    @property
    def drafter(self) -> object:
        return self.waiting.drafter

    async def open(self, prompt: Sequence[int]) -> None:
        begun = await self.opens(prompt)
        self._prompt = list(prompt)
        self._chosen = self.running if begun or self.runs(None) else self.waiting
        await self._chosen.open(prompt)

    async def round(self, tokens: Sequence[int], k: int, model_k: int | None = None) -> tuple[Draft, Verdict]:
        assert self._chosen is not None, "open comes first"
        self._rounds += 1
        if self._rounds % RECONSIDERED == 0:
            await self._reconsider(tokens)
        draft, verdict = await self._chosen.round(tokens, k, model_k)
        self._until = self.clock()
        if self._since is None:  # the first round of a way, in which it begins, is not timed
            self._since, self._tokens = self._until, 0
        else:
            self._tokens += len(verdict.token_ids)
        if self._chosen is self.waiting:
            self.reach.waited(len(draft.token_ids), verdict, self.measures_steps)
        return draft, verdict

    def _report(self) -> None:
        """Reports the time of the rounds since the last report, if they committed enough tokens."""
        if self._since is not None and self._tokens >= LEAST_TIMED:
            self.took(self._chosen is self.running, self._tokens, self._until - self._since)
        self._since = None

    async def _reconsider(self, tokens: Sequence[int]) -> None:
        before = self._chosen
        assert before is not None
        self._report()
        now = self.running if self.runs(before is self.running) else self.waiting
        if now is not before:
            await before.suspend(tokens)
            await now.resume(self._prompt)
            self._chosen = now

    async def close(self) -> None:
        self._report()
        first = self._chosen or self.running  # which may have begun before the session was open
        try:
            await first.close()
        finally:
            await (self.waiting if first is self.running else self.running).close()
