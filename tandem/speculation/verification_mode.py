"""Whether a request's rounds wait for a remote target, and how far ahead of it to draft."""

from __future__ import annotations

import enum
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tandem.speculation.estimate import (
    MOST_ALONE,
    SMOOTHING,
    TRIAL_SHARE,
    AcceptanceRates,
    Estimate,
    Line,
    best_length,
    expected_by_length,
)
from tandem.speculation.loop import Rounds
from tandem.speculation.types import Draft, LengthPlan, Proposer, Verdict

# Round trip / verification below which depth stays minimal: on shared cores drafting ahead costs more than it saves
# (measured at 1 ms / 11 ms: `auto` took 1.1 to 1.2 times as long per token as stop-and-wait).
SHORT_NETWORK = 0.25

FADING = 0.98  # decay of a request's acceptance, per token
UNLIKELY = 0.02  # a path less likely than this is not drafted
MOST_AHEAD = 64  # tokens beyond those known to be committed
REFRESH = 8  # steps between plans
LEAST_GAIN = 1.03  # expected speedup that drafts need, times how they slow a step: work between steps slows alike
TRIED = 4  # draft tokens of a trial that the target must have answered
LONGEST_TRIAL = 64  # steps
MOST_GAINED = 16  # steps' time that drafts which gained may cost again
UNMEASURED = 1.0  # seconds for which drafting slows steps, before they are measured


class Pipeline(enum.Enum):
    """Whether rounds overlap, or the target never waits. The values are command-line values."""

    OFF = "off"
    ON = "on"
    NEVER_WAITING = "never-waiting"
    AUTO = "auto"


class Depth:
    """Chooses the depth for one request; all requests to a target share `estimate`."""

    def __init__(self, pipeline: Pipeline, most: int, estimate: Estimate | None = None) -> None:
        if most < 1:
            raise ValueError(f"depth: at least 1 round must be in flight, not {most}")
        self._least = min(most, 2 if pipeline is Pipeline.ON else 1)
        self._most = 1 if pipeline is Pipeline.OFF else most
        self.estimate = estimate or Estimate()

    def of(self, k: int) -> int:
        """Returns how many rounds of `k` draft tokens to keep in flight."""
        known = self.estimate
        if k == 0:
            return 1
        if not known.timed or self._most == 1 or known.rtt < SHORT_NETWORK * known.verification:
            return self._least
        meanwhile = (known.rtt + known.verification) / max(1e-9, (k + 1) * known.draft_token)
        return max(self._least, math.floor(min(self._most, 1 + meanwhile)))


NEAR_SECONDS = 0.005  # a shorter round trip is waited for until the target's times are known


def never_waits(pipeline: Pipeline, most: int, estimate: Estimate, opening_rtt: float = 0.0) -> bool:
    """Returns whether a never-waiting target likely serves best, with drafts of at most `most` tokens."""
    if pipeline is not Pipeline.AUTO:
        return pipeline is Pipeline.NEVER_WAITING
    if most == 0:
        return True  # plain decoding saves every round trip
    if not estimate.timed:
        return opening_rtt >= NEAR_SECONDS
    near = estimate.rtt < SHORT_NETWORK * estimate.verification
    return not near or (estimate.alone.known and not estimate.waiting_pays(most))


class DraftPlan(NamedTuple):
    depth: int  # tokens ahead
    fresh: int  # tokens drafted before any is sent
    width: int  # draft tokens per step; 0: nothing is sent


RESTING = DraftPlan(0, 0, 0)


class LookaheadPolicy:
    """Plans one request's drafts, of at most `most_width` tokens a step, or `fixed` without rest. `given`: the plan.

    Drafts that the measured times and acceptance don't promise to pay may cost TRIAL_SHARE of the steps' time.
    """

    def __init__(
        self, most_width: int, estimate: Estimate, fixed: int | None = None, given: DraftPlan | None = None
    ) -> None:
        if most_width < 0:
            raise ValueError(f"lookahead: a step verifies at least 0 draft tokens, not {most_width}")
        self.most = most_width if fixed is None else min(most_width, fixed)
        self._fixed, self.estimate, self.given = fixed, estimate, given
        self._acceptance = AcceptanceRates(estimate.ahead, FADING)
        self._plan: DraftPlan | None = None
        # Of the plan: steps, tokens that they committed, their seconds, and draft tokens that the target answered, or
        # undisturbed steps
        self._steps = self._tokens = self._tried = 0
        self._seconds = 0.0
        self._tries = False  # the plan's drafts are not expected to pay

    @property
    def acceptance(self) -> float:
        return self._acceptance.rates(1)[0]

    def observe(self, hit: bool) -> None:
        """Records whether a token drafted ahead was right."""
        self._tried += 1
        for known in (self._acceptance, self.estimate.ahead, self.estimate.acceptance[Proposer.MODEL]):
            known.note(1, hit)

    def waited(self, drafted: int, verdict: Verdict) -> None:
        for position in range(min(drafted, verdict.accepted + 1)):
            for known in (self._acceptance, self.estimate.ahead):
                known.note(1, position < verdict.accepted)

    def stepped(self, drafted: int, verdict: Verdict, now: float, copied: bool) -> None:
        """Records a step whose verdict came at `now`, in seconds. `copied`: the target could have copied its draft."""
        known, plan, times = self.estimate, self.plan, tuple[Line, ...]()
        if plan.width:
            times = (known.target,)
            known.alone_due -= 1
            late = 2 * (known.rtt + known.verification)  # what is under way when drafting ends is slowed too
            known.alone_from = now + (UNMEASURED if math.isnan(late) else late)
        elif now >= known.alone_from:
            times = (known.alone,)
            self._tried += 1
        known.stepped(drafted + 1, verdict, *times)
        self._steps += 1
        if not copied:
            self._tokens += len(verdict.token_ids)
            self._seconds += verdict.compute_seconds
        elif plan.width and known.alone.known:  # drafting only slowed it
            self._seconds += verdict.compute_seconds - known.alone.at(known.others + drafted + 1)

    @property
    def plan(self) -> DraftPlan:
        if self.given:
            return self.given
        if self._plan is None or self._over(self._plan):
            self._settle(self._plan or RESTING)
            self._plan = self._choose()
            self._steps = self._tokens = self._tried = 0
            self._seconds = 0.0
        return self._plan

    def rests(self) -> bool:
        """Returns whether a request begins without drafts. Every fourth that could may draft, to measure acceptance."""
        known = self.estimate
        if self._fixed is not None or self.plan.width or known.alone_due <= 0:
            return False
        known.rested = (known.rested + 1) % 4
        return known.rested > 0

    def _over(self, plan: DraftPlan) -> bool:
        return self._steps >= (REFRESH if not plan.width or self._tried >= TRIED else LONGEST_TRIAL)

    def _settle(self, plan: DraftPlan) -> None:
        """Counts what the plan's drafts cost or gained beside plain steps."""
        known = self.estimate
        plain = known.alone.at(known.others + 1)
        if not plan.width:
            if self._tried >= TRIED and known.alone_due <= 0:
                known.alone_due, known.alone_every = known.alone_every, min(MOST_ALONE, 2 * known.alone_every)
            share = TRIAL_SHARE * self._seconds
            known.credit = min(known.trial, known.credit + share)
            known.gained = max(known.gained, min(0.0, known.gained + share))
        elif known.alone.known:
            cost = self._seconds - self._tokens * plain
            if self._tries:
                known.trial += SMOOTHING * (max(0.0, cost) - known.trial)
                known.credit = min(known.trial, known.credit - cost)
            else:
                known.gained = min(MOST_GAINED * plain, known.gained - cost)

    def _choose(self) -> DraftPlan:
        known, rate = self.estimate, self.acceptance
        adaptive = self._fixed is None
        if self.most == 0 or (adaptive and known.alone_due <= 0):
            return RESTING
        if not (known.timed and known.target.known):
            self._tries = adaptive
            may = not adaptive or known.credit >= known.trial
            return DraftPlan(2 * self.most, self.most, self.most) if may else RESTING
        tokens, seconds = expected_by_length([rate] * self.most), known.steps(self.most)
        width = best_length(tokens, seconds, known.rows) if adaptive else self.most
        late = steps_late(known.rtt, known.draft_token, seconds[0], width)
        plain = known.alone.at(known.others + 1)
        pays = gain(rate, width, late, seconds, plain) * plain > LEAST_GAIN * max(plain, seconds[0])
        self._tries = not (pays and known.gained >= 0.0)
        if adaptive and self._tries and known.credit < known.trial:
            return RESTING
        width = max(width, 1)
        likely = math.ceil(math.log(UNLIKELY) / math.log(rate))
        depth = max(width, min(math.ceil(late * tokens[width]) + width, likely, MOST_AHEAD))
        return DraftPlan(depth, min(late + width, depth), width)


def steps_late(rtt: float, draft: float, step: float, width: int) -> int:
    """Returns the plain steps before a draft arrives that reaches `width` tokens beyond them. Arguments in seconds."""
    drafting = min(1.0, draft / max(step, 1e-9))  # what is drafted meanwhile must be drafted too
    ahead = (rtt / max(step, 1e-9) + width * drafting) / max(1e-9, 1 - drafting)
    return max(1, math.ceil(min(ahead, MOST_AHEAD)))


def gain(rate: float, width: int, late: int, seconds: list[float], alone: float) -> float:
    """Returns the speedup over steps that take `alone` seconds of a run whose drafts arrive `late` steps late."""
    if not width or not seconds[0]:
        return 1.0
    reached = max(1e-9, rate**late)  # drafts resume after `late` right tokens in succession
    plain, drafted = (1 / reached - 1) / (1 - rate), 1 / (1 - rate ** (width + 1))
    return (plain + 1 / (1 - rate)) * alone / (plain * seconds[0] + drafted * seconds[width])


@dataclass(slots=True)
class ChosenRounds(Rounds):
    """Rounds of one of two ways at the same session, with the same drafter."""

    opens: Callable[[Sequence[int]], Awaitable[bool]]  # whether the target already runs
    runs: Callable[[], bool]
    waiting: Rounds
    running: Rounds
    lookahead: LookaheadPolicy
    measures_steps: bool = False  # waiting rounds do not
    _chosen: Rounds | None = None

    async def open(self, prompt: Sequence[int]) -> None:
        begun = await self.opens(prompt)
        self._chosen = self.running if begun or self.runs() else self.waiting
        await self._chosen.open(prompt)

    async def round(self, tokens: Sequence[int], plan: LengthPlan) -> tuple[Draft, Verdict]:
        assert self._chosen is not None, "open comes first"
        draft, verdict = await self._chosen.round(tokens, plan)
        if self._chosen is self.waiting:
            self.lookahead.waited(len(draft.token_ids), verdict)
            if self.measures_steps:
                self.lookahead.estimate.verified(verdict.queue_seconds + verdict.compute_seconds, None)
        return draft, verdict

    async def close(self) -> None:
        first = self._chosen or self.running  # which may have begun before the session was open
        try:
            await first.close()
        finally:
            await (self.waiting if first is self.running else self.running).close()
