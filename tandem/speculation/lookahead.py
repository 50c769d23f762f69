"""Chooses how many tokens to draft ahead for a verifier that never waits, and how many of them its steps verify.

A draft must reach beyond what the target commits while it is made and travels. The formula of never_waiting_theory
gives the time per token for each width of a step, from measured times and acceptance; the best width is taken, and a
depth that keeps the target's steps filled while the next drafts travel. Where drafting does not pay, because its drafts
come too late or because it slows a target on the same machine more than it helps, the drafter rests, and only now and
then drafts a token to see what would be accepted. Times are arguments; no clock is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.speculation.contention import Contention
from tandem.speculation.mode_ratios import PRIOR_RUNNING, ModeRatio
from tandem.speculation.never_waiting_theory import (
    HIGHEST_RATE,
    MIN_STEP,
    MOST_AHEAD,
    cycle_of,
    run_rate,
    steps_before_draft,
)
from tandem.speculation.round_statistics import ANY_ROWS, tokens_of_step
from tandem.speculation.step_times import MeasuredTimes, StepTimes
from tandem.speculation.theory import expected_tokens
from tandem.speculation.types import Verdict

PRIOR_RATE, PRIOR_TRIALS = 0.6, 4.0
"""Acceptance per token before anything was drafted, and its weight in trials."""
PROCESS_TRIALS = 6.0
"""The weight, in trials, of the acceptance of a process's other requests at the beginning of one."""
FADING, PROCESS_FADING = 0.98, 0.999
"""Factors by which each token fades what is known of acceptance, of one request and of the process."""
UNLIKELY = 0.02
"""A token whose path so far is less likely than this is not drafted."""
REFRESH = 8
"""Steps after which the reach is computed again."""
LEAST_GAIN, LEAST_FREE_GAIN, SURE_GAIN = 1.03, 1.005, 1.5
"""Below the first the drafter rests, or below the second if drafting does not slow the target; above the third it does
not rest to measure what drafting costs the target."""
NO_SLOWDOWN = 1.02
"""What plain steps may take longer beside drafting that does not slow the target: times vary by that much."""
SETTLED = 2
"""Steps after a change, beyond those under way, that are not timed as steps beside drafting or without."""
SMOOTHING = 0.2
"""Weight of a step in the smoothed number of tokens that other rows add to it."""


class _Share:
    """A fading share of hits."""

    def __init__(self, rate: float, trials: float, fading: float) -> None:
        self._hits, self._trials, self._fading = rate * trials, trials, fading

    def note(self, *hits: bool) -> None:
        for hit in hits:
            self._hits = self._fading * self._hits + hit
            self._trials = self._fading * self._trials + 1

    @property
    def rate(self) -> float:
        return self._hits / self._trials


@dataclass(slots=True)
class RunMeasurements:
    """What the requests of a process measured at one target: times, steps by their tokens, and acceptance."""

    times: MeasuredTimes = field(default_factory=MeasuredTimes)
    steps: StepTimes = field(default_factory=lambda: StepTimes(growing_share=0.1))
    acceptance: _Share = field(default_factory=lambda: _Share(PRIOR_RATE, PRIOR_TRIALS, PROCESS_FADING))
    contention: Contention = field(default_factory=Contention)
    waiting: ModeRatio = field(default_factory=ModeRatio)
    running: ModeRatio = field(default_factory=lambda: ModeRatio(PRIOR_RUNNING))
    others: float = 0.0
    """Tokens that other rows add to a step."""
    rows: float = 1.0
    """Rows that share a step, this one included."""

    def stepped(self, tokens: int, verdict: Verdict) -> None:
        """Records the step of a run, in which this session had `tokens` tokens."""
        whole = tokens_of_step(verdict, tokens - 1)
        if verdict.compute_seconds > 0:
            self.steps.note(ANY_ROWS, whole, verdict.compute_seconds)
        self.shared(whole - tokens, verdict.rows)

    def shared(self, others: int, rows: int) -> None:
        """Records with how many tokens of others, and rows in all, a step was shared."""
        self.others += SMOOTHING * (max(0, others) - self.others)
        self.rows += SMOOTHING * (rows - self.rows)


class DraftPlan(NamedTuple):
    """How far to draft: `depth` tokens ahead, the first `fresh` of them before any is sent; `width` for each step.

    With a width of 0 nothing is sent.
    """

    depth: int
    fresh: int
    width: int


RESTING = DraftPlan(1, 1, 0)


class LookaheadPolicy:
    """The reach of one request's drafts. `most`: the most draft tokens that a step verifies.

    `fixed`: the draft tokens of a step, if they are not chosen here; the drafter never rests then.
    """

    def __init__(self, most_width: int, measured: RunMeasurements, fixed: int | None = None) -> None:
        if most_width < 0:
            raise ValueError(f"reach: a step verifies at least 0 draft tokens, not {most_width}")
        self.most = most_width if fixed is None else min(most_width, fixed)
        self._fixed, self.measured = fixed, measured
        self._acceptance = _Share(measured.acceptance.rate, PROCESS_TRIALS, FADING)
        self._plan: DraftPlan | None = None
        self._tokens_per_step = 1.0  # that the plan promises
        self._resting = False
        self._changed = 0  # steps since the drafter began to rest or to draft
        self._under_way = 0  # steps that arrive after a change and were made before it
        self._since = 0

    @property
    def acceptance(self) -> float:
        """The estimated chance that the target's token is the draft's."""
        return self._acceptance.rate

    def observe(self, hit: bool) -> None:
        """Records whether the target's token was the one drafted for its place."""
        self._acceptance.note(hit)
        self.measured.acceptance.note(hit)

    def waited(self, drafted: int, verdict: Verdict, measures: bool) -> None:
        """Records a round that was waited for. `measures`: nobody else records the time of its verification."""
        hits = [position < verdict.accepted for position in range(min(drafted, verdict.accepted + 1))]
        self._acceptance.note(*hits)
        self.measured.acceptance.note(*hits)
        if measures:
            self.measured.times.verified(verdict.queue_seconds + verdict.compute_seconds, None)
        self.measured.shared(tokens_of_step(verdict, drafted) - drafted - 1, verdict.rows)

    def stepped(self, drafted: int, verdict: Verdict, copied: bool = False) -> None:
        """Records a step of the run, which verified `drafted` draft tokens or, if `copied`, tokens of the text."""
        self.measured.stepped(drafted + 1, verdict)
        self._since += 1
        self._changed += 1
        alone = verdict.rows == 1 and not drafted and verdict.compute_seconds > 0
        if self._changed > self._under_way + SETTLED:
            if alone:
                self.measured.contention.plain_step(self._resting, verdict.compute_seconds)
            if not self._resting:
                tokens = 1 if copied else len(verdict.token_ids)  # drafts gain nothing where a copy was verified
                self.measured.contention.committed(tokens, self._tokens_per_step)

    @property
    def plan(self) -> DraftPlan:
        """The reach to draft with now."""
        waits = REFRESH if self._changed >= self._under_way + REFRESH else self._under_way + REFRESH
        if self._plan is None or self._since >= waits:
            self._plan, self._since = self._choose(), 0
        return self._plan

    def _choose(self) -> DraftPlan:
        if self.most == 0:
            return DraftPlan(0, 0, 0)
        known = self.measured.times.known
        if known is None or not self.measured.steps.steps:
            return DraftPlan(2 * self.most, self.most, self.most)
        plan, gain, table = self._best()
        rests = self._rests(gain)
        if rests != self._resting:
            self._resting, self._changed = rests, 0
            self._under_way = math.ceil(known.rtt / max(table[0], MIN_STEP))
        return RESTING if rests else plan

    def _rests(self, gain: float) -> bool:
        """Returns whether the drafter rests, where theory promises to be `gain` times as fast with drafts."""
        contention = self.measured.contention
        if self._fixed is not None:
            return False
        least = LEAST_FREE_GAIN if contention.slowdown <= NO_SLOWDOWN else LEAST_GAIN
        if contention.gain(gain) < least:
            return not (self._resting and contention.unknown(False) and gain >= least)
        return gain < SURE_GAIN and contention.unknown(True) and not contention.unknown(False)

    def _best(self) -> tuple[DraftPlan, float, tuple[float, ...]]:
        """Returns the plan that is fastest, how much faster than no drafts, and the seconds of steps by width."""
        measured, known = self.measured, self.measured.times.known
        assert known is not None
        table = measured.steps.table(ANY_ROWS, self.most, 1 + round(measured.others))
        widths = range(1, self.most + 1) if self._fixed is None else [self.most]
        late = {width: steps_before_draft(known.rtt, known.draft, table, width) for width in widths}
        rate = self.acceptance
        company = max(0.0, measured.rows - 1)
        rates = {width: run_rate(rate, width, late[width], table, company) for width in widths}
        width = max(rates, key=rates.__getitem__)
        cycle = cycle_of(rate, width, late[width])
        self._tokens_per_step = cycle.tokens / cycle.steps
        return plan_for(rate, width, late[width]), rates[width] * table[0] / (1 + company), table


def plan_for(acceptance: float, width: int, late: int) -> DraftPlan:
    """Returns the depth that fills steps of `width` until the next drafts come, as far as they are likely."""
    rate = min(max(acceptance, 0.01), HIGHEST_RATE)
    wanted = math.ceil(late * expected_tokens(rate, width)) + width
    likely = math.ceil(math.log(UNLIKELY) / math.log(rate))
    depth = max(width, min(wanted, likely, MOST_AHEAD))
    return DraftPlan(depth, min(late + width, depth), width)
