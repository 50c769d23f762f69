"""Rates statements by `RULES`: noise if any says so, else weak if any does, else sure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from tandem.comparison.analysis.intervals import Interval
from tandem.comparison.analysis.summary import completed
from tandem.comparison.measuring.distributions import ratio
from tandem.comparison.measuring.machine_load import MachineLoad
from tandem.comparison.measuring.records import Record

ALIKE = 1.05  # ratios within this factor of 1 are equal for any decision
LEAST_PROMPTS, SURE_ANSWERS = 3, 8
LEAST_TOKENS, SURE_TOKENS = 30, 100
LEAST_STEPS = 4  # requests whose step times can be compared
IDLE, MORE_RUNS, MORE_PROMPTS = "on an idle machine", "with --num-runs 5", "with more prompts"


class Sureness(Enum):
    SURE = "sure"
    WEAK = "weak"
    NOISE = "noise"


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence of a statement. None raises no doubt."""

    prompts: int | None = None  # this and the next two: of the architecture with the least
    answers: int | None = None
    timed_tokens: int | None = None
    interval: Interval | None = None  # 95 %, of the stated ratio
    busy: float | None = None  # share of this machine that other programs took or waited for
    steps_vary: float | None = None  # slowest tenth of a target's steps over the fastest
    apart: str | None = None  # how servers differ, or that it is predicted or measured in one pass
    tie: bool = False  # the ratio to another good choice may be 1


@dataclass(frozen=True, slots=True)
class Doubt:
    """Phrases, the gravest first."""

    sureness: Sureness
    reasons: tuple[str, ...]
    surer: tuple[str, ...] = ()  # how to measure again


Found = tuple[Sureness, str, str] | None


def _amount(of: Evidence) -> Found:
    if of.prompts is not None and of.prompts < LEAST_PROMPTS:
        return Sureness.NOISE, f"prompts that were answered: {of.prompts}, and {LEAST_PROMPTS} are needed", MORE_PROMPTS
    if of.timed_tokens is not None and of.timed_tokens < SURE_TOKENS:
        sureness = Sureness.NOISE if of.timed_tokens < LEAST_TOKENS else Sureness.WEAK
        return sureness, f"only {of.timed_tokens} tokens were timed", "with longer answers"
    if of.answers is not None and of.answers < SURE_ANSWERS:
        return Sureness.WEAK, f"only {of.answers} answers of each were compared, {SURE_ANSWERS} are needed", MORE_RUNS
    return None


def _chance(of: Evidence) -> Found:
    if of.answers is not None and of.interval is None:
        return Sureness.NOISE, "there is no interval", MORE_PROMPTS
    if of.interval is not None and includes_1(of.interval) and not alike(of.interval):
        low, high = of.interval
        return Sureness.NOISE, f"the 95 % interval ({low:.2f} to {high:.2f}) leaves open which is faster", MORE_RUNS
    return (Sureness.WEAK, "the best are too close to call", MORE_RUNS) if of.tie else None


def _busy(of: Evidence) -> Found:
    if of.busy is None or of.busy <= 0.1:
        return None
    sureness = Sureness.NOISE if of.busy > 0.3 else Sureness.WEAK
    return sureness, f"other programs wanted {100 * of.busy:.0f} % of this machine", IDLE


def _steps(of: Evidence) -> Found:
    if of.steps_vary is None or of.steps_vary <= 1.5:
        return None
    sureness = Sureness.NOISE if of.steps_vary > 3 else Sureness.WEAK
    return sureness, f"the slowest steps took {of.steps_vary:.1f} times as long as the fastest", IDLE


def _apart(of: Evidence) -> Found:
    return (
        (Sureness.WEAK, of.apart, "in a comparison under that condition, with servers started alike")
        if of.apart
        else None
    )


RULES: tuple[Callable[[Evidence], Found], ...] = (_amount, _chance, _busy, _steps, _apart)


def doubt(evidence: Evidence) -> Doubt:
    found = [one for rule in RULES if (one := rule(evidence))]
    if not found:
        return Doubt(Sureness.SURE, tuple(_grounds(evidence)))
    found.sort(key=lambda one: one[0] is not Sureness.NOISE)
    return Doubt(found[0][0], tuple(why for _, why, _ in found), tuple(dict.fromkeys(how for *_, how in found)))


def _grounds(of: Evidence) -> Iterable[str]:
    if of.answers is not None and of.prompts is not None:
        yield f"{of.answers} answers to {of.prompts} prompts"
    if of.interval is not None:
        yield f"the 95 % interval is {of.interval[0]:.2f} to {of.interval[1]:.2f}"
    if of.busy is not None:
        yield "this machine had little else to do"
    if of.steps_vary is not None:
        yield "steps took even times"


def includes_1(interval: Interval) -> bool:
    return interval[0] <= 1 <= interval[1]


def alike(interval: Interval) -> bool:
    return interval[0] >= 1 / ALIKE and interval[1] <= ALIKE


def evidence_of(own: Sequence[Record], other: Sequence[Record], plain: Sequence[Record], cores: int) -> Evidence:
    """Returns the evidence of comparing two architectures; steps are plain decoding's where it ran."""
    timed = [[r for r in of if r.measurement and r.measurement.tpot_s is not None] for of in (own, other)]
    both = set.intersection(*({(r.prompt, r.run) for r in of} for of in timed))
    return Evidence(
        prompts=len({prompt for prompt, _ in both}),
        answers=len(both),
        timed_tokens=min(sum(m.output_tokens - 1 for m in completed(of)) for of in (own, other)),
        busy=busy([record.machine_load for record in (*own, *other) if record.machine_load], cores),
        steps_vary=spread(
            [s for m in completed(plain) if m.rounds and (s := m.seconds_by_cause.verify / m.rounds) > 0]
        ),
    )


def busy(loads: Sequence[MachineLoad], cores: int) -> float | None:
    """Returns other programs' mean share of this machine, waiting threads included; None: unknown."""
    taken = [load.others + (load.steal or 0.0) for load in loads if load.others is not None]
    waiting = [load.waiting / max(1, cores) for load in loads if load.waiting is not None]
    known = ([statistics.fmean(taken)] if taken else []) + ([0.4 * statistics.fmean(waiting)] if waiting else [])
    return min(1.0, max(known)) if known else None


def spread(steps: Sequence[float]) -> float | None:
    """Returns the slowest tenth over the fastest; None for too few steps."""
    if len(steps) < LEAST_STEPS:
        return None
    low, *_, high = statistics.quantiles(steps, n=10, method="inclusive")
    return ratio(high, low)
