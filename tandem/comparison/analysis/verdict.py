"""Decides which architecture to use: measured alone, under a load, or predicted; rates how sure that is by `RULES`."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from tandem.comparison.analysis.summary import Interval, Summary, completed, speedup
from tandem.comparison.analysis.theory import asking, rounds_of
from tandem.comparison.analysis.words import joined, name_in_sentence
from tandem.comparison.measuring import architectures as arch
from tandem.comparison.measuring.conditions import BASE, LINK, Condition
from tandem.comparison.measuring.deployment import Endpoint
from tandem.comparison.measuring.distributions import ratio
from tandem.comparison.measuring.machine_load import MachineLoad
from tandem.comparison.measuring.records import Record
from tandem.rpc.credentials import on_this_machine

ALIKE = 1.05  # ratios within this factor of 1 are equal for any decision
LEAST_PROMPTS, SURE_ANSWERS = 3, 8
LEAST_TOKENS, SURE_TOKENS = 30, 100
LEAST_STEPS = 4  # requests whose step times can be compared
IDLE, MORE_RUNS, MORE_PROMPTS = "on an idle machine", "with --num-runs 5", "with more prompts"
ALIKE_SERVERS = "in a comparison under that condition, with servers started alike"
CLOSE = 1.03  # without an interval, figures within this factor are equal
ACTIONS = {
    arch.LOOKUP.name: "use lookup, copies from the text without a draft model",
    arch.DISTRIBUTED.name: "use distributed, the draft apart from the target",
    arch.FUSED.name: "use fused, draft and target in one server",
    arch.REMOTE_DRAFT.name: "use remote draft, the target asks for drafts",
    arch.NEVER_WAITING.name: "use never waiting, the target runs on without drafts",
    arch.PIPELINED.name: "use pipelined, rounds are sent ahead of verdicts",
    arch.HEADED.name: "use distributed head, an EAGLE-3 head drafts apart",
}
PLAINLY = "decode plainly: drafts cost more than they save"
LITTLE = "decode plainly: drafts save too little to matter"
FAST, RATE = "times as fast as", "times the tokens per second of"


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


Found = tuple[Sureness, str, str] | None  # how sure at most, why, and how to measure again


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
    if of.interval is not None and of.interval[0] <= 1 <= of.interval[1] and not alike(of.interval):
        low, high = of.interval
        return Sureness.NOISE, f"the 95 % interval ({low:.2f} to {high:.2f}) leaves open which is faster", MORE_RUNS
    return (Sureness.WEAK, "the best are too close to call", MORE_RUNS) if of.tie else None


def _over(value: float | None, weak: float, noise: float, why: str, how: str) -> Found:
    if value is None or value <= weak:
        return None
    return Sureness.NOISE if value > noise else Sureness.WEAK, why.format(value), how


RULES: tuple[Callable[[Evidence], Found], ...] = (
    _amount,
    _chance,
    lambda of: _over(of.busy and 100 * of.busy, 10, 30, "other programs wanted {:.0f} % of this machine", IDLE),
    lambda of: _over(of.steps_vary, 1.5, 3, "the slowest steps took {:.1f} times as long as the fastest", IDLE),
    lambda of: (Sureness.WEAK, of.apart, ALIKE_SERVERS) if of.apart else None,
)


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


@dataclass(frozen=True, slots=True)
class Rival:
    architecture: str
    ratio: float | None  # the fastest's speed over this one's
    interval: Interval | None = None  # 95 %

    @property
    def tied(self) -> bool:
        if self.interval is None:
            return self.ratio is None or self.ratio < CLOSE
        return self.interval[0] <= 1

    @property
    def alike(self) -> bool:
        if self.interval is None:
            return self.ratio is not None and self.ratio < CLOSE
        return alike(self.interval)


@dataclass(frozen=True, slots=True)
class Situation:
    condition: str  # "" if predicted
    where: str
    rtt_ms: float
    clients: int = 1  # 0: an open loop
    unit: str = FAST


@dataclass(frozen=True, slots=True)
class Verdict:
    at: Situation
    architecture: str  # to use; if undecided, the fastest
    sentence: str
    doubt: Doubt
    over: str
    ratio: float | None  # speed over that of `over`
    interval: Interval | None
    fastest: str
    rivals: tuple[Rival, ...]  # all but the fastest

    @property
    def sureness(self) -> str:
        return self.doubt.sureness.value

    @property
    def decided(self) -> bool:
        return self.doubt.sureness is not Sureness.NOISE


def _decided(
    at: Situation,
    order: Sequence[str],
    compare: Callable[[str, str], Rival],
    evidence: Callable[[str, str], Evidence],
) -> Verdict | None:
    """Decides between the fastest and plain decoding (or the next): drafts only where clearly faster than none.

    `order`: the fastest first.
    """
    if len(order) < 2:
        return None
    best = order[0]
    rivals = tuple(compare(best, other) for other in order[1:])
    against = next((one for one in rivals if one.architecture in arch.PLAIN), rivals[0])
    none = best in arch.PLAIN or (against.architecture in arch.PLAIN and against.alike)
    ties = [] if none else [one.architecture for one in rivals if one.tied and one.architecture not in arch.PLAIN]
    found = doubt(replace(evidence(best, against.architecture), interval=against.interval, tie=bool(ties)))
    over, times, interval = against.architecture, against.ratio, against.interval
    if none and best not in arch.PLAIN:  # plain decoding is chosen, so the ratio is turned
        over, times = best, ratio(1.0, against.ratio or 0.0)
        interval = (1 / interval[1], 1 / interval[0]) if interval else None
    chosen = arch.AUTOREGRESSIVE.name if none else best
    sentence = _sentence(at, chosen, ties, against.alike, over, times, found)
    return Verdict(at, chosen, sentence, found, over, times, interval, best, rivals)


def _sentence(
    at: Situation, chosen: str, ties: Sequence[str], alike: bool, over: str, times: float | None, found: Doubt
) -> str:
    marked = "" if at.condition else " (predicted)"
    if found.sureness is Sureness.NOISE:
        return f"{at.where}, nothing can be decided: {found.reasons[0]}{marked}."
    if chosen in arch.PLAIN:
        return f"{at.where}, {LITTLE if alike else PLAINLY}{marked}."
    figure = "" if times is None else f": {times:.2f} {at.unit} {name_in_sentence(over)}"
    if ties:
        names = [name_in_sentence(name) for name in (chosen, *ties)]
        return f"{at.where}, {joined(names, 'or')}, too close to call{figure}{marked}."
    return f"{at.where}, {ACTIONS[chosen]}{figure}{marked}."


def measured_verdict(
    on: Condition,
    summaries: Sequence[Summary],
    records: Sequence[Record],
    endpoints: Sequence[Endpoint],
    cores: int,
) -> Verdict | None:
    """Decides a condition without a load; None if fewer than two architectures answered."""
    tpots = tpots_of(summaries)
    own = {name: [r for r in records if (r.condition, r.architecture) == (on.name, name)] for name in tpots}
    plain = next((own[name] for name in reversed(arch.PLAIN) if name in own), [])

    def compare(best: str, other: str) -> Rival:
        found = speedup(own[best], own[other])
        return Rival(other, found.ratio, found.interval)

    def evidence(best: str, other: str) -> Evidence:
        return replace(evidence_of(own[best], own[other], plain, cores), apart=unlike(endpoints, best, other))

    at = Situation(on.name, where(on), 1000 * on.link.seconds)
    return _decided(at, sorted(tpots, key=tpots.__getitem__), compare, evidence)


def loaded_verdict(
    on: Condition, rates: Mapping[str, float], latencies: Mapping[str, float], evidence: Evidence
) -> Verdict | None:
    """Decides by tokens per second under a load; among close ones by mean latency."""
    most, clients = max(rates.values(), default=0.0), on.load.concurrency if on.load else 0

    def rank(name: str) -> tuple[bool, float]:
        close = rates[name] * CLOSE >= most
        return not close, latencies[name] if close else -rates[name]

    def compare(best: str, other: str) -> Rival:
        return Rival(other, ratio(rates[best], rates[other]))

    at = Situation(on.name, f"With {on.load}", 1000 * on.link.seconds, clients or 0, RATE)
    once = replace(evidence, apart="it was measured in one pass, so there is no interval")
    return _decided(at, sorted(rates, key=rank), compare, lambda best, other: once)


def predicted_verdict(
    links: Sequence[tuple[float, Sequence[Summary]]], known: Sequence[Verdict], rtt_ms: float, clients: int
) -> Verdict | None:
    """Decides for an unmeasured round trip or number of clients. `links`: (RTT in ms, summaries).

    The target is modelled as a queue with one server; shared steps do better with many clients.
    """
    names = dict.fromkeys(name for _, summaries in links for name in tpots_of(summaries))
    times = {name: time for name in names if (time := estimate(links, name, rtt_ms, clients))}
    nearest = min((v for v in known if v.at.clients == 1), key=lambda v: abs(v.at.rtt_ms - rtt_ms), default=None)
    measured = ", ".join(f"{rtt:g}" for rtt, _ in links)
    evidence = Evidence(apart=f"it is predicted from one client at round trips of {measured} ms")

    def compare(best: str, other: str) -> Rival:
        return Rival(other, ratio(times[other], times[best]))

    at = f"At {rtt_ms:g} ms with {clients} clients" if clients > 1 else f"At {rtt_ms:g} ms"
    order = sorted(times, key=times.__getitem__)
    found = _decided(Situation("", at, rtt_ms, clients), order, compare, lambda best, other: evidence)
    if found is None or nearest is None or nearest.decided:
        return found
    return replace(found, sentence=f"{at}, nothing can be predicted: {nearest.doubt.reasons[0]}.", doubt=nearest.doubt)


def estimate(links: Sequence[tuple[float, Sequence[Summary]]], name: str, rtt_ms: float, clients: int) -> float | None:
    """Predicts seconds per token, None if impossible: interpolates RTTs; beyond, a draft apart pays once a round."""
    found = [(rtt, s) for rtt, of in links for s in of if s.architecture == name and s.tpot_s]
    points = sorted(found, key=lambda point: point[0])
    if not points:
        return None
    at, nearest = min(points, key=lambda point: abs(point[0] - rtt_ms))
    alone, split = nearest.tpot_s or 0.0, name in arch.COMPARED and arch.COMPARED[name].split
    if split and at != rtt_ms:
        around = [pair for pair in itertools.pairwise(points) if pair[0][0] <= rtt_ms <= pair[1][0]]
        rounds = rounds_of(nearest)
        if around:
            (left, first), (right, second) = around[0]
            share = (rtt_ms - left) / (right - left)
            alone = (1 - share) * (first.tpot_s or 0.0) + share * (second.tpot_s or 0.0)
        elif rounds is None or name in (arch.NEVER_WAITING.name, arch.PIPELINED.name):
            return None
        else:
            each = asking(name, rounds) / rounds.committed * rounds.as_defined
            least = alone - (nearest.milliseconds_per_token["network"] or 0.0) / 1000
            alone = max(alone + each * (rtt_ms - at) / 1000, least, 0.0)
    if clients == 1:
        return alone
    causes = ("verify",) if split or name not in arch.COMPARED else ("verify", "draft")  # on the target's device
    busy_s = sum(nearest.milliseconds_per_token[cause] or 0.0 for cause in causes) / 1000
    return max(alone, clients * (nearest.tpot_s or 0.0 if name == arch.NEVER_WAITING.name else busy_s))


def tpots_of(summaries: Sequence[Summary]) -> dict[str, float]:
    """Returns the candidates' mean times per token, with the faster plain decoding as the only one."""
    known = (*arch.COMPARED, arch.WIDTH_1.name)
    found = {s.architecture: s.tpot_s for s in summaries if s.tpot_s is not None and s.architecture in known}
    if arch.WIDTH_1.name in found:
        found.pop(arch.AUTOREGRESSIVE.name, None)
    return found


def where(on: Condition) -> str:
    if on.varies not in (BASE, LINK):
        return f"At {on.name}" if on.request.sampling.temperature else f"Under {on.name}"
    if on.link.rtt_ms is None:
        return "Here"
    return f"On {on.link.but.recorded}" if on.link.but.recorded else f"At {on.link.rtt_ms:g} ms"


def host_of(endpoint: Endpoint) -> str:
    host = endpoint.address.rpartition(":")[0].strip("[]")
    return "this machine" if endpoint.log is not None or on_this_machine(host) else host


def unlike(endpoints: Sequence[Endpoint], name: str, other: str) -> str | None:
    """Returns how two architectures' servers differ, if known."""
    pair = [e for e in endpoints if e.architecture.name in (name, other)]
    if len({host_of(e) for e in pair}) > 1:
        return " beside ".join(f"{name_in_sentence(e.architecture.name)} on {host_of(e)}" for e in pair)
    if len({e.log is None for e in pair}) > 1:
        ran = next(e for e in pair if e.log is None)
        return f"the server of {name_in_sentence(ran.architecture.name)} ran already, with settings of its own"
    return None
