"""Decides which architecture to use: measured alone, under a load, or predicted; rates how sure that is by `RULES`."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from tandem.comparison.analysis.summary import CLOSE, Interval, Speedup, Summary, alike, completed, speedup
from tandem.comparison.analysis.words import joined, name_in_sentence
from tandem.comparison.measuring import architectures as arch
from tandem.comparison.measuring.architectures import BASE, LINK, Condition, Load
from tandem.comparison.measuring.deployment import Endpoint
from tandem.comparison.measuring.distributions import ratio
from tandem.comparison.measuring.machine import MachineLoad
from tandem.comparison.measuring.records import Record
from tandem.rpc.credentials import on_this_machine

LEAST_PROMPTS, SURE_ANSWERS = 3, 8
LEAST_TOKENS, SURE_TOKENS = 30, 100
LEAST_STEPS = 4  # requests whose step times can be compared
IDLE, MORE_RUNS, MORE_PROMPTS = "on an idle machine", "with --num-runs 5", "with more prompts"
ALIKE_SERVERS = "in a comparison under that condition, with servers started alike"
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
class Decision:
    """What to use at a round trip and a number of clients."""

    condition: str  # "" if predicted
    rtt_ms: float
    clients: int  # 0: an open loop
    unit: str
    architecture: str  # to use; if undecided, the fastest
    sentence: str
    doubt: Doubt
    over: str
    ratio: float | None  # speed over that of `over`
    interval: Interval | None
    fastest: str
    rivals: tuple[Speedup, ...]  # the fastest over each other

    @property
    def sureness(self) -> str:
        return self.doubt.sureness.value

    @property
    def decided(self) -> bool:
        return self.doubt.sureness is not Sureness.NOISE


def _decided(
    where: str,
    condition: str,
    rtt_ms: float,
    order: Sequence[str],
    compare: Callable[[str, str], Speedup],
    evidence: Callable[[str, str], Evidence],
    clients: int = 1,
    unit: str = FAST,
) -> Decision | None:
    """Decides between the fastest and plain decoding (or the next): drafts only where clearly faster than none.

    `order`: the fastest first.
    """
    if len(order) < 2:
        return None
    best = order[0]
    rivals = tuple(compare(best, other) for other in order[1:])
    against = next((one for one in rivals if one.over in arch.PLAIN), rivals[0])
    none = best in arch.PLAIN or (against.over in arch.PLAIN and against.alike)
    ties = [] if none else [one.over for one in rivals if one.tied and one.over not in arch.PLAIN]
    found = doubt(replace(evidence(best, against.over), interval=against.interval, tie=bool(ties)))
    over, times, interval = against.over, against.ratio, against.interval
    if none and best not in arch.PLAIN:  # plain decoding is chosen, so the ratio is turned
        over, times = best, ratio(1.0, against.ratio or 0.0)
        interval = (1 / interval[1], 1 / interval[0]) if interval else None
    chosen = arch.AUTOREGRESSIVE.name if none else best
    marked = "" if condition else " (predicted)"
    if found.sureness is Sureness.NOISE:
        sentence = f"{where}, nothing can be {'decided' if condition else 'predicted'}: {found.reasons[0]}."
    elif none:
        sentence = f"{where}, {LITTLE if against.alike else PLAINLY}{marked}."
    else:
        names = joined([name_in_sentence(name) for name in (chosen, *ties)], "or")
        what = f"{names}, too close to call" if ties else ACTIONS[chosen]
        figure = "" if times is None else f": {times:.2f} {unit} {name_in_sentence(over)}"
        sentence = f"{where}, {what}{figure}{marked}."
    return Decision(condition, rtt_ms, clients, unit, chosen, sentence, found, over, times, interval, best, rivals)


def measured_decision(
    on: Condition, summaries: Sequence[Summary], records: Sequence[Record], endpoints: Sequence[Endpoint], cores: int
) -> Decision | None:
    """Decides a condition without a load; None if fewer than two architectures answered."""
    tpots = tpots_of(summaries)
    own = {name: [r for r in records if (r.condition, r.architecture) == (on.name, name)] for name in tpots}
    plain = next((own[name] for name in reversed(arch.PLAIN) if name in own), [])

    def evidence(best: str, other: str) -> Evidence:
        return replace(evidence_of(own[best], own[other], plain, cores), apart=unlike(endpoints, best, other))

    def compare(best: str, other: str) -> Speedup:
        return speedup(own[best], own[other], other)

    order = sorted(tpots, key=tpots.__getitem__)
    return _decided(where(on), on.name, 1000 * on.link.seconds, order, compare, evidence)


def loaded_decision(
    on: Condition, load: Load, summaries: Sequence[Summary], records: Sequence[Record]
) -> Decision | None:
    """Decides by tokens per second under a load, among close ones by mean latency.

    Returns None if fewer than two architectures answered everything.
    """
    rates, latencies = dict[str, float](), dict[str, float]()
    for s in summaries:
        rate, latency = s.mean_output_throughput_token_per_s, s.distributions["end_to_end_latency_s"].mean
        if s.architecture in arch.COMPARED and s.requests >= load.requests and rate and latency is not None:
            rates[s.architecture], latencies[s.architecture] = rate, latency
    most = max(rates.values(), default=0.0)
    busy_of = [record.machine_load for record in records if record.condition == on.name and record.machine_load]
    evidence = Evidence(busy=busy(busy_of, 1), apart="it was measured in one pass, so there is no interval")

    def rank(name: str) -> tuple[bool, float]:
        close = rates[name] * CLOSE >= most
        return not close, latencies[name] if close else -rates[name]

    def compare(best: str, other: str) -> Speedup:
        return Speedup(other, ratio(rates[best], rates[other]))

    at, rtt_ms = f"With {load}", 1000 * on.link.seconds
    order = sorted(rates, key=rank)
    return _decided(at, on.name, rtt_ms, order, compare, lambda *_: evidence, load.concurrency or 0, RATE)


def predicted_decision(
    links: Sequence[tuple[float, Sequence[Summary]]], known: Sequence[Decision], rtt_ms: float, clients: int
) -> Decision | None:
    """Decides for an unmeasured round trip or number of clients. `links`: (RTT in ms, summaries).

    The target is modelled as a queue with one server; shared steps do better with many clients.
    """
    names = dict.fromkeys(name for _, summaries in links for name in tpots_of(summaries))
    times = {name: time for name in names if (time := estimate(links, name, rtt_ms, clients))}
    nearest = min(known, key=lambda each: abs(each.rtt_ms - rtt_ms), default=None)
    measured = ", ".join(f"{rtt:g}" for rtt, _ in links)
    evidence = Evidence(apart=f"it is predicted from one client at round trips of {measured} ms")

    def compare(best: str, other: str) -> Speedup:
        return Speedup(other, ratio(times[other], times[best]))

    at = f"At {rtt_ms:g} ms with {clients} clients" if clients > 1 else f"At {rtt_ms:g} ms"
    order = sorted(times, key=times.__getitem__)
    found = _decided(at, "", rtt_ms, order, compare, lambda *_: evidence, clients)
    if found is None or nearest is None or nearest.decided:
        return found
    return replace(found, sentence=f"{at}, nothing can be predicted: {nearest.doubt.reasons[0]}.", doubt=nearest.doubt)


def trips_per_token(summary: Summary) -> float | None:
    """Returns round trips per token of TPOT = (E2E - TTFT) / (n - 1), which skips the first one's; None without drafts.

    A target with a remote draft makes none in a round without a draft.
    """
    of, tokens = summary.acceptance, summary.distributions["number_output_tokens"].mean
    if not of.drafted or not of.rounds or tokens is None:
        return None
    committed = 1 + of.accepted / of.rounds
    asking = of.proposing if summary.architecture == arch.REMOTE_DRAFT.name else None
    counted = (tokens - committed) / (tokens - 1) if tokens > committed else 1.0
    return (1.0 if asking is None else asking) / committed * counted


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
        trips = trips_per_token(nearest)
        if around:
            (left, first), (right, second) = around[0]
            share = (rtt_ms - left) / (right - left)
            alone = (1 - share) * (first.tpot_s or 0.0) + share * (second.tpot_s or 0.0)
        elif trips is None or name in (arch.NEVER_WAITING.name, arch.PIPELINED.name):
            return None
        else:
            least = alone - (nearest.milliseconds_per_token["network"] or 0.0) / 1000
            alone = max(alone + trips * (rtt_ms - at) / 1000, least, 0.0)
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
    return f"On {on.link.recorded}" if on.link.recorded else f"At {on.link.rtt_ms:g} ms"


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
