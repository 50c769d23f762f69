"""Decides which architecture to use, from times measured, measured under a load, or predicted."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tandem.comparison.analysis import doubt as doubts
from tandem.comparison.analysis.doubt import Doubt, Evidence, Sureness, evidence_of
from tandem.comparison.analysis.intervals import Interval
from tandem.comparison.analysis.summary import Summary, speedup
from tandem.comparison.analysis.theory import asking, rounds_of
from tandem.comparison.analysis.words import joined, name_in_sentence
from tandem.comparison.links.settings import LinkSettings
from tandem.comparison.measuring import architectures as arch
from tandem.comparison.measuring.conditions import BASE, LINK, Condition
from tandem.comparison.measuring.deployment import Endpoint
from tandem.comparison.measuring.distributions import ratio
from tandem.comparison.measuring.records import Record
from tandem.rpc.credentials import on_this_machine

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


@dataclass(frozen=True, slots=True)
class Rival:
    """Another architecture against the fastest."""

    architecture: str
    ratio: float | None  # the fastest's speed over this one's
    interval: Interval | None = None  # 95 %

    @property
    def tied(self) -> bool:
        """Whether either may be faster."""
        if self.interval is None:
            return self.ratio is None or self.ratio < CLOSE
        return self.interval[0] <= 1

    @property
    def alike(self) -> bool:
        """Whether the two are the same for any decision."""
        if self.interval is None:
            return self.ratio is not None and self.ratio < CLOSE
        return doubts.alike(self.interval)


@dataclass(frozen=True, slots=True)
class Situation:
    """The link and the load of a decision."""

    condition: str  # "" if not measured
    where: str
    rtt_ms: float
    clients: int = 1  # 0: an open loop
    unit: str = FAST

    @property
    def predicted(self) -> bool:
        return not self.condition


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision in a situation."""

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
    found = doubts.doubt(replace(evidence(best, against.architecture), interval=against.interval, tie=bool(ties)))
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
    marked = " (predicted)" if at.predicted else ""
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

    def compare(best: str, other: str) -> Rival:
        return Rival(other, ratio(times[other], times[best]))

    def evidence(best: str, other: str) -> Evidence:
        measured = ", ".join(f"{rtt:g}" for rtt, _ in links)
        return Evidence(apart=f"it is predicted from one client at round trips of {measured} ms")

    with_clients = f" with {clients} clients" if clients > 1 else ""
    found = _decided(
        Situation("", f"At {rtt_ms:g} ms{with_clients}", rtt_ms, clients),
        sorted(times, key=times.__getitem__),
        compare,
        evidence,
    )
    if found is None or nearest is None or nearest.decided:
        return found
    sentence = f"{found.at.where}, nothing can be predicted: {nearest.doubt.reasons[0]}."
    return replace(found, sentence=sentence, doubt=nearest.doubt)


def estimate(links: Sequence[tuple[float, Sequence[Summary]]], name: str, rtt_ms: float, clients: int) -> float | None:
    """Predicts seconds per token, None if impossible: interpolates RTTs; beyond, a draft apart pays once a round."""
    found = [(rtt, s) for rtt, of in links for s in of if s.architecture == name and s.tpot_s]
    points = sorted(found, key=lambda point: point[0])
    if not points:
        return None
    at, nearest = min(points, key=lambda point: abs(point[0] - rtt_ms))
    alone = nearest.tpot_s or 0.0
    if name in arch.COMPARED and arch.COMPARED[name].split and at != rtt_ms:
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
    return max(alone, clients * _busy_s(nearest)) if clients > 1 else alone


def _busy_s(of: Summary) -> float:
    """Returns the seconds per token that occupy the target's device, drafts beside it included."""
    if of.architecture == arch.NEVER_WAITING.name:
        return of.tpot_s or 0.0
    beside = of.architecture in arch.COMPARED and not arch.COMPARED[of.architecture].split
    causes = ("verify", "draft") if beside else ("verify",)
    return sum(of.milliseconds_per_token[cause] or 0.0 for cause in causes) / 1000


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
    return on_link(on.link)


def on_link(link: LinkSettings) -> str:
    if link.rtt_ms is None:
        return "Here"
    return f"On {link.but.recorded}" if link.but.recorded else f"At {link.rtt_ms:g} ms"


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
