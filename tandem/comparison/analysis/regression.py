"""Compares two comparisons and finds changes beyond noise.

Intervals are bootstrapped over the prompts that both measured. That does not cover drift in the machine's speed between
the runs, so an architecture is judged by its speedup, in which the machine's speed cancels; only plain decoding, and
all where it did not run, are judged by their time per token. Figures under load are not judged: requests that run
beside each other are not independent.

What cannot be judged is said to be so and has an exit code of its own: a change that may be a regression, though the
prompts are too few or too unlike to tell, or the machine was too busy. No figure that is GROSS times worse passes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tandem.comparison.analysis.bootstrap import MIN_UNITS, Interval, percentiles, resampled
from tandem.comparison.analysis.doubt import Sureness, doubt
from tandem.comparison.analysis.evidence import beside_loads
from tandem.comparison.analysis.metrics import ratio
from tandem.comparison.measuring.architectures import OPENAI, PLAIN
from tandem.comparison.measuring.json_form import decoded
from tandem.comparison.measuring.machine_load import MachineLoad
from tandem.comparison.report.formatting import length, plural

REGRESSED, NOT_JUDGED = 3, 5
"""The exit codes for a regression, and for figures that cannot be judged."""
TELLING = 1.25
"""A figure can be judged if its interval excludes that it is worse by this factor, or that it is not worse."""
GROSS = 2.0
"""By this factor any figure is worse, also one that is not judged otherwise."""
LESS_IS_BETTER = {"tpot": True, "ttft": True, "speedup": False, "acceptance rate": False}


@dataclass(frozen=True, slots=True)
class Change:
    """One figure before and after. `ratio` is after / before; `interval` is 95 %, None for too few prompts.

    `judged`: whether it can count as a regression; other figures are informational unless they are worse by GROSS.
    `why_not`: why a change for the worse is not called a regression though it may be one, or why no change of this
    figure could be one; empty otherwise.
    """

    condition: str
    architecture: str
    figure: str
    before: float
    after: float
    interval: Interval | None
    judged: bool
    why_not: str = ""

    @property
    def ratio(self) -> float:
        return self.after / self.before

    @property
    def beyond_noise(self) -> bool:
        return self.interval is not None and not self.interval[0] <= 1 <= self.interval[1]

    @property
    def worse(self) -> float:
        """Returns the factor by which it is worse; below 1 if it is better."""
        return self._worse(self.ratio)

    @property
    def at_worst(self) -> float:
        """Returns the factor by which it may be worse, as far as the interval goes."""
        return self.worse if self.interval is None else max(map(self._worse, self.interval))

    def _worse(self, share: float) -> float:
        if LESS_IS_BETTER[self.figure]:
            return share
        return 1 / share if share > 0 else math.inf

    @property
    def regression(self) -> bool:
        return self.judged and self.beyond_noise and self.worse > 1 and not self.why_not

    @property
    def not_judged(self) -> bool:
        return bool(self.why_not)


Key = tuple[str, str]
Records = Mapping[str, Sequence[Mapping[str, Any]]]


def changes_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Compares the figures of two parsed comparison.json of schema version 2, the older first."""
    old, new = _grouped(before), _grouped(after)
    loads = {record["condition"] for record in after["records"] if record.get("sent_s") is not None}
    busy = _busy(before, "the earlier run") or _busy(after, "this run")
    other = _other_length(before, after)
    found = [
        replace(change, judged=change.judged and key[0] not in loads)
        for key in new
        if key in old
        for change in _changes(key, old, new, after["baseline"])
    ]
    return [
        replace(change, judged=False, why_not=other)
        if other and change.architecture not in (*PLAIN, OPENAI.name)
        else replace(change, why_not=_why_not(change, busy, change.condition in loads))
        for change in found
    ]


def _other_length(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Says that the runs drafted other lengths by their settings, so that nothing drafted is comparable; or nothing."""
    then, now = (of["settings"].get("speculation_length") for of in (before, after))
    return "" if then == now else f"speculation length {length(then)} then, {length(now)} now"


def _why_not(change: Change, busy: str, loaded: bool) -> str:
    """Says why a figure that may have become worse is not judged; empty if it is, or has not."""
    if not change.judged:
        if change.worse < GROSS:
            return ""
        return "requests beside each other are not independent" if loaded else f"it is {change.worse:.1f} times as bad"
    if change.interval is None:
        return "too few prompts for an interval"
    if change.beyond_noise:
        return busy if change.worse > 1 else ""
    if change.at_worst >= TELLING:
        return f"it may be {change.at_worst:.2f} times worse and may be no worse"
    return ""


def _busy(comparison: Mapping[str, Any], which: str) -> str:
    """Says that the machine was too busy for figures to be compared; empty if it was not, or if it is not known."""
    loads = [decoded(MachineLoad, r["machine_load"]) for r in comparison["records"] if r.get("machine_load")]
    found = doubt(beside_loads(loads, comparison["machine"].get("usable_cores") or 1))
    return f"{found.brief} during {which}" if found.sureness is Sureness.NOISE else ""


def _grouped(comparison: Mapping[str, Any]) -> dict[Key, dict[str, list[Mapping[str, Any]]]]:
    """Groups completed records by (condition, architecture) and prompt."""
    groups: defaultdict[Key, defaultdict[str, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for record in comparison["records"]:
        if record["error"] is None and record["tpot_s"] is not None:
            groups[record["condition"], record["architecture"]][record["prompt"]].append(record)
    return {key: dict(group) for key, group in groups.items()}


def _changes(
    key: Key, old: Mapping[Key, Records], new: Mapping[Key, Records], baseline: Mapping[str, Any] | None
) -> Iterator[Change]:
    plain = (key[0], baseline["architecture"]) if baseline else None
    alone = plain is None or key == plain or plain not in old or plain not in new
    prompts = [prompt for prompt in new[key] if prompt in old[key]]
    for figure, name in (("tpot", "tpot_s"), ("ttft", "ttft_s")):
        sides = [_sums(side[key], prompts, name) for side in (old, new)]
        yield from _change(key, figure, sides, alone and figure == "tpot")
    if plain is not None and not alone:
        shared = [p for p in prompts if p in old[plain] and p in new[plain]]
        sides = [
            (_sums(side[plain], shared, "tpot_s")[0], _sums(side[key], shared, "tpot_s")[0]) for side in (old, new)
        ]
        yield from _change(key, "speedup", sides, True)
    sides = [(_sums(side[key], prompts, "accepted")[0], _sums(side[key], prompts, "drafted")[0]) for side in (old, new)]
    yield from _change(key, "acceptance rate", sides, True)


Side = tuple[Sequence[float], Sequence[float]]


def _sums(records: Records, prompts: Sequence[str], name: str) -> Side:
    """Returns the sum of a figure for each prompt, and its number of requests."""
    return [sum(r[name] for r in records[p]) for p in prompts], [float(len(records[p])) for p in prompts]


def _change(key: Key, figure: str, sides: Sequence[Side], judged: bool) -> Iterator[Change]:
    before, after = (ratio(sum(above), sum(below)) for above, below in sides)
    if not before or after is None or ratio(after, before) is None:  # too little data to compare
        return
    yield Change(*key, figure, before, after, _interval(sides), judged)


def _interval(sides: Sequence[Side]) -> Interval | None:
    units = len(sides[0][0])
    if units < MIN_UNITS:
        return None
    chosen = resampled(units)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        old, new = (np.asarray(a, float)[chosen].sum(1) / np.asarray(b, float)[chosen].sum(1) for a, b in sides)
        return percentiles(new / old)


COMPARED_SETTINGS = ("max_new_tokens", "speculation_length", "num_runs", "model", "draft_model", "draft", "dtype",
                     "rehearse")  # fmt: skip


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Yields what else differs: architectures, settings, machines, and the tokens of requests."""
    old, new = _grouped(before), _grouped(after)
    yield from (f"{c}, {a}: not in both" for c, a in sorted(set(old) ^ set(new)))
    for name in COMPARED_SETTINGS:
        then, now = before["settings"].get(name), after["settings"].get(name)
        if then != now:
            said = map(length, (then, now)) if name == "speculation_length" else (then, now)
            yield "{}: {} then, {} now".format(name, *said)
    if before["machine"] != after["machine"]:
        yield "the machines differ, so TTFT and TPOT are not comparable"
    if other := list(_other_tokens(old, new)):
        yield f"{len(other)} requests produced other tokens than before, the first: {other[0]}"


def _other_tokens(old: Mapping[Key, Records], new: Mapping[Key, Records]) -> Iterator[str]:
    """Yields requests whose tokens differ between the two: another model, other arithmetic or a bug."""
    for key, group in new.items():
        for prompt, records in group.items():
            before = {tuple(r["output_token_ids"]) for r in old.get(key, {}).get(prompt, ())}
            if before and any(tuple(r["output_token_ids"]) not in before for r in records):
                yield f"{key[0]}, {key[1]}, {prompt}"


def regression_lines(changes: Sequence[Change], remarks: Iterable[str]) -> Iterator[str]:
    """Yields the lines to print."""
    shown = (change for change in changes if change.judged or change.beyond_noise or change.not_judged)
    yield from map(_line, shown)
    yield from remarks
    count, unjudged = sum(change.regression for change in changes), sum(change.not_judged for change in changes)
    if not any(change.judged or change.not_judged for change in changes):
        yield "not judged: the two runs have no figure in common that could be"
    elif unjudged:
        how = "with the same settings, with more prompts or on an idle machine"
        yield f"not judged: {plural(unjudged, 'figure')}; measure again, {how}"
    elif not count:
        yield "no regression beyond noise"
    if count:
        yield f"{plural(count, 'regression')} beyond noise"


def _line(change: Change) -> str:
    spread = "too few prompts for an interval"
    if change.interval is not None:
        low, high = (100 * (value - 1) for value in change.interval)
        spread = f"95 % interval {low:+.1f} to {high:+.1f} %"
    verdict = "REGRESSION" if change.regression else "beyond noise" if change.beyond_noise else "within noise"
    if change.beyond_noise and not change.judged:
        verdict = "informational"
    if change.not_judged:
        verdict = f"NOT JUDGED: {change.why_not}"
    return (
        f"{change.condition}, {change.architecture}, {change.figure}: {change.before:.4g} then, {change.after:.4g} now"
        f" ({100 * (change.ratio - 1):+.1f} %, {spread}): {verdict}"
    )


def judge(before: Mapping[str, Any], after: Mapping[str, Any]) -> int:
    """Prints the changes and returns the exit code: 0, REGRESSED, or NOT_JUDGED if there may be a regression."""
    changes = changes_between(before, after)
    print(f"\ncompared with the run of {before['started_at']}:")
    print("\n".join(regression_lines(changes, differences(before, after))))
    if any(change.regression for change in changes):
        return REGRESSED
    return NOT_JUDGED if any(c.not_judged for c in changes) or not any(c.judged for c in changes) else 0
