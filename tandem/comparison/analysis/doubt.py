"""Says how sure a statement is: `RULES` is the whole rule, one row for each reason to doubt.

A statement is *noise* if one rule says so, else *weak* if one says so, else *sure*.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from tandem.comparison.analysis.bootstrap import Interval

EARLY_TOKENS = 8
"""An answer with fewer tokens ended early: it has next to no time per token."""
ALIKE = 1.05
"""Times per token are the same, for any decision, where their ratio is within this factor of 1."""
LEAST_PROMPTS = 3
"""The least number of prompts from which anything is concluded."""
MISSED = 1.25
"""Predictions that are off by more than this factor are not to be relied on."""
IDLE = "on an idle machine"
MORE_RUNS = "with --num-runs 5"
MORE_PROMPTS = "with more prompts"


class Sureness(Enum):
    SURE = "sure"
    WEAK = "weak"
    NOISE = "noise"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a statement rests on. None: not known, or no matter for this statement; it then raises no doubt.

    prompts, answers, timed_tokens: how much was measured, of the architecture with the least. interval: 95 %, of the
    ratio that is stated. early: the share of answers under EARLY_TOKENS. waiting: threads of other programs for each
    core; others, steal: shares of the time of all cores; load_average: for each core, used where the others are not
    known. steps_vary: the slowest tenth of a target's steps over the fastest. steps_drift: the later half of the run
    over the earlier one, or its inverse, whichever is above 1. missed: the factor by which predictions are off.
    apart: how the servers that are compared differ. predicted: not measured. once: measured in one pass.
    """

    prompts: int | None = None
    answers: int | None = None
    timed_tokens: int | None = None
    interval: Interval | None = None
    early: float | None = None
    others: float | None = None
    waiting: float | None = None
    steal: float | None = None
    load_average: float | None = None
    steps_vary: float | None = None
    steps_drift: float | None = None
    missed: float | None = None
    apart: str | None = None
    predicted: bool = False
    once: bool = False


@dataclass(frozen=True, slots=True)
class Doubt:
    """How sure a statement is. `reasons` and `surer` (what to run instead) are phrases, the gravest first.

    brief: the gravest reason in at most five words; empty if the statement is sure.
    """

    sureness: Sureness
    reasons: tuple[str, ...]
    surer: tuple[str, ...]
    brief: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """One reason to doubt: a statement is weak or noise where `value` is above the limit, or below it if `least`.

    A limit of None is never crossed. `reason` is filled in with the value and the evidence.
    """

    value: Callable[[Evidence], float | None]
    weak: float | None
    noise: float | None
    reason: str
    brief: str
    surer: str
    least: bool = False

    def crossed(self, value: float, limit: float | None) -> bool:
        return limit is not None and (value < limit if self.least else value > limit)


def _by_chance(of: Evidence) -> float | None:
    """Returns 1 if either may be the faster one, by more than is the same; 0 if not. None if nothing is compared."""
    if of.interval is None:
        return None if _answers(of) is None else 1.0
    low, high = of.interval
    return float(low <= 1 <= high and not (low >= 1 / ALIKE and high <= ALIKE))


def _answers(of: Evidence) -> float | None:
    """Returns the number of answers, unless there are too few prompts anyway."""
    return None if of.prompts is not None and of.prompts < LEAST_PROMPTS else of.answers


def _load_average(of: Evidence) -> float | None:
    return of.load_average if of.others is None and of.waiting is None else None


def _span(of: Evidence) -> str:
    return "none" if of.interval is None else f"{of.interval[0]:.2f} to {of.interval[1]:.2f}"


RULES: tuple[Rule, ...] = (
    Rule(lambda of: of.prompts, None, LEAST_PROMPTS,
         "prompts that were answered: {value:.0f}, and 3 are needed to compare",
         "too few prompts were measured", MORE_PROMPTS, least=True),
    Rule(lambda of: of.waiting, 0.25, 1.0, "{value:.1f} threads of other programs wanted each core",
         "this machine was busy", IDLE),
    Rule(lambda of: of.others, 0.1, 0.3, "other programs had {percent:.0f} % of this machine's processor time",
         "this machine was busy", IDLE),
    Rule(lambda of: of.steal, 0.02, 0.1, "the host of this virtual machine took {percent:.0f} % of its processor time",
         "the host took processor time", "on a machine of its own"),
    Rule(_load_average, 1.5, 3.0, "the load average was {value:.1f} for each core",
         "this machine was busy", IDLE),
    Rule(lambda of: of.early, 0.25, 0.5, "{percent:.0f} % of the answers ended under " f"{EARLY_TOKENS} tokens",
         "most answers ended early", "with prompts that are answered at length"),
    Rule(lambda of: of.timed_tokens, 100, 30, "only {value:.0f} tokens were timed",
         "too few tokens were timed", "with longer answers", least=True),
    Rule(lambda of: of.missed, MISSED, 2.0, "predictions from step times are off by a factor of {value:.2f}",
         "step times did not last", IDLE),
    Rule(lambda of: of.steps_vary, 1.5, 3.0, "the slowest steps took {value:.1f} times as long as the fastest",
         "step times varied too much", IDLE),
    Rule(lambda of: of.steps_drift, 1.15, 1.5, "steps changed by a factor of {value:.2f} during the run",
         "step times changed meanwhile", IDLE),
    Rule(_by_chance, None, 0.5, "the 95 % interval ({span}) leaves open which is faster",
         "differences are within chance", MORE_RUNS),
    Rule(_answers, 8, None, "only {value:.0f} answers of each were compared, and 8 are needed to be sure",
         "few answers were compared", MORE_RUNS, least=True),
    Rule(lambda of: float(bool(of.apart)), 0.5, None, "{apart}",
         "servers are not alike", "with every server started the same way, on one machine"),
    Rule(lambda of: float(of.once), 0.5, None, "it was measured in one pass, so there is no interval",
         "it was one pass", "and see whether it comes out the same"),
    Rule(lambda of: float(of.predicted), 0.5, None, "it is predicted, not measured",
         "it is a prediction", "in a comparison under that condition"),
)  # fmt: skip


def doubt(evidence: Evidence) -> Doubt:
    """Applies the rules. The same reason is not given twice, nor the same way to be surer."""
    found: list[tuple[bool, Rule, float]] = []
    for rule in RULES:
        value = rule.value(evidence)
        if value is not None and (rule.crossed(value, rule.noise) or rule.crossed(value, rule.weak)):
            found.append((rule.crossed(value, rule.noise), rule, value))
    if not found:
        return Doubt(Sureness.SURE, _grounds(evidence), ())
    found.sort(key=lambda one: not one[0])
    sureness = Sureness.NOISE if found[0][0] else Sureness.WEAK
    named = {"span": _span(evidence), "apart": evidence.apart}
    reasons = (rule.reason.format(value=value, percent=100 * value, **named) for _, rule, value in found)
    ways = (rule.surer for _, rule, _ in found)
    return Doubt(sureness, tuple(dict.fromkeys(reasons)), tuple(dict.fromkeys(ways)), found[0][1].brief)


def _grounds(of: Evidence) -> tuple[str, ...]:
    """Returns what makes a statement sure."""
    known = (
        (of.answers is not None and of.prompts is not None, f"{of.answers} answers to {of.prompts} prompts"),
        (of.interval is not None, f"the 95 % interval is {_span(of)}"),
        (of.others is not None or of.waiting is not None, "this machine had little else to do"),
        (of.steps_vary is not None, "steps took even times"),
        (of.missed is not None, "predictions from step times agree"),
    )
    return tuple(text for is_known, text in known if is_known)
