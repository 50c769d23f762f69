"""Says what to do on each link, in at most twelve words, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tandem.comparison.analysis.bootstrap import Interval
from tandem.comparison.analysis.doubt import ALIKE, Doubt, Evidence, Sureness, doubt
from tandem.comparison.analysis.evidence import between
from tandem.comparison.analysis.findings import Theory
from tandem.comparison.analysis.metrics import Speedup, speedup
from tandem.comparison.analysis.summary import Summary
from tandem.comparison.links.settings import LinkSettings
from tandem.comparison.measuring import architectures as arch
from tandem.comparison.measuring.conditions import Condition
from tandem.comparison.measuring.json_form import INLINE
from tandem.comparison.measuring.record_log import RunData
from tandem.comparison.report.formatting import name_in_sentence

ACTIONS = {
    arch.AUTOREGRESSIVE.name: "decode plainly: drafts cost more than they save",
    arch.LOOKUP.name: "use lookup: copies from the text, no draft model",
    arch.DISTRIBUTED.name: "use distributed: draft apart from the target",
    arch.FUSED.name: "use fused: draft and target in one server",
    arch.REMOTE_DRAFT.name: "use remote draft: the target asks for drafts",
    arch.NEVER_WAITING.name: "use never waiting: the target runs on without drafts",
    arch.PIPELINED.name: "use pipelined: send rounds ahead of verdicts",
    arch.HEADED.name: "use distributed head: an EAGLE-3 head drafts apart",
}
LITTLE = "decode plainly: drafts save too little to matter"


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement and how sure it is. `about`: "speed", "load", "prediction" or "tokens".

    ratio, interval: the figure that is stated, with its 95 % interval, where it is a ratio.
    """

    about: str
    condition: str
    text: str
    ratio: float | None
    interval: Interval | None
    doubt: Doubt = field(metadata=INLINE)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do under a condition. `architecture`: the one to use; if nothing can be decided, the fastest measured.

    headline: at most twelve words. ratio, interval: its speed over plain decoding's; of plain decoding itself, and
    where that did not run, over that of the next best. line: the same in one line for a list of conditions.
    """

    condition: str
    architecture: str
    headline: str
    line: str
    ratio: float | None
    interval: Interval | None
    doubt: Doubt = field(metadata=INLINE)


@dataclass(frozen=True, slots=True)
class Compared:
    """The best architecture against another: `speed.speedup` is by how much the best is faster."""

    other: str
    speed: Speedup
    doubt: Doubt

    @property
    def alike(self) -> bool:
        interval = self.speed.interval
        return interval is not None and interval[0] >= 1 / ALIKE and interval[1] <= ALIKE

    @property
    def tied(self) -> bool:
        """Whether either may be the faster one for all that was measured."""
        interval = self.speed.interval
        return interval is None or interval[0] <= 1 <= interval[1]


def verdict(
    measured: RunData, condition: Condition, summaries: Sequence[Summary], theory: Theory | None
) -> tuple[Verdict, list[Statement]] | None:
    """Decides under a condition, and states how the best compares with each other one; None if nothing is compared."""
    tpots = {s.architecture: mean for s in summaries if (mean := s.distributions["tpot_s"].mean) is not None}
    if arch.WIDTH_1.name in tpots:  # plain decoding at its fastest stands for plain decoding
        tpots.pop(arch.AUTOREGRESSIVE.name, None)
    tpots = {name: mean for name, mean in tpots.items() if name in (*arch.COMPARED, arch.WIDTH_1.name)}
    if len(tpots) < 2:
        return None
    order = sorted(tpots, key=tpots.__getitem__)
    best = order[0]
    found = [_compared(measured, condition.name, best, other, theory) for other in order[1:]]
    statements = [
        Statement("speed", condition.name, _text(best, one), one.speed.speedup, one.speed.interval, one.doubt)
        for one in found
    ]
    return _decided(condition, best, found), statements


def _compared(measured: RunData, condition: str, best: str, other: str, theory: Theory | None) -> Compared:
    under = [record for record in measured.records if record.condition == condition]
    own, theirs = ([r for r in under if r.architecture == name] for name in (best, other))
    speed = speedup(own, theirs)
    evidence = between(measured, condition, (best, other), speed.interval, theory)
    return Compared(other, speed, doubt(evidence))


def _text(best: str, of: Compared) -> str:
    names = name_in_sentence(best), name_in_sentence(of.other)
    if of.speed.speedup is None:
        return f"the times of {names[0]} and {names[1]} have no ratio"
    if of.alike:
        return f"{names[0]} and {names[1]} take the same time per token"
    return f"{names[0]} is {of.speed.speedup:.2f} times as fast as {names[1]}"


def _decided(condition: Condition, best: str, found: Sequence[Compared]) -> Verdict:
    """Decides by the best against plain decoding; without it, or if it is the best, against the next best."""
    against = next((one for one in found if one.other in arch.PLAIN), found[0])
    ties = [one.other for one in found if one.tied and one is not against]
    speed, doubts = against.speed, against.doubt
    chosen, what = best, _what(best, ties)
    if against.alike and against.other in arch.PLAIN:
        chosen, what = against.other, LITTLE
        turned = (1 / speed.interval[1], 1 / speed.interval[0]) if speed.interval else None
        speed = replace(speed, speedup=1 / speed.speedup if speed.speedup else None, interval=turned)
    elif best in arch.PLAIN and against.alike:
        what = LITTLE
    chosen = arch.AUTOREGRESSIVE.name if chosen in arch.PLAIN else chosen
    if doubts.sureness is Sureness.NOISE:
        what = f"nothing can be decided: {doubts.brief}"
    compared = _rival(chosen, best, against.other)
    line = _line(condition, chosen, compared, speed.speedup, doubts)
    return Verdict(
        condition.name, chosen, f"{_where(condition.link)}, {what}", line, speed.speedup, speed.interval, doubts
    )


def _where(link: LinkSettings) -> str:
    """Says on which link, in three words at most."""
    if link.rtt_ms is None:
        return "Here"
    return f"On {link.but.recorded}" if link.but.recorded else f"At {link.rtt_ms:g} ms"


def _rival(chosen: str, best: str, other: str) -> str:
    """Returns what the chosen one is compared with."""
    if chosen == arch.AUTOREGRESSIVE.name and best not in arch.PLAIN:
        return best
    return other


def _what(best: str, ties: Sequence[str]) -> str:
    best = arch.AUTOREGRESSIVE.name if best in arch.PLAIN else best
    if best == arch.AUTOREGRESSIVE.name or not ties:
        return ACTIONS[best]
    if len(ties) == 1:
        return f"{name_in_sentence(best)} or {name_in_sentence(ties[0])}: too close to call"
    return f"draft: {name_in_sentence(best)}, with others too close to call"


def _line(condition: Condition, chosen: str, other: str, ratio: float | None, doubts: Doubt) -> str:
    where = "not emulated" if condition.link.rtt_ms is None else f"{condition.link}"
    if doubts.sureness is Sureness.NOISE:
        return f"{where}: not decided ({doubts.reasons[0]})"
    times = "" if ratio is None else f", {ratio:.2f} times as fast as {name_in_sentence(other)}"
    return f"{where}: {name_in_sentence(chosen)}{times} ({doubts.sureness.value})"


def predicted(condition: str, text: str, off_by: float | None) -> Statement:
    """Returns a statement that was predicted; `off_by`: the factor by which predictions of the run are off."""
    return Statement("prediction", condition, text, None, None, doubt(Evidence(predicted=True, missed=off_by)))
