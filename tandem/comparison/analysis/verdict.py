"""Decides which architecture to use, from times measured alone or under a load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tandem.comparison.analysis import doubt as doubts
from tandem.comparison.analysis.doubt import Doubt, Evidence, Sureness, evidence_of
from tandem.comparison.analysis.intervals import Interval
from tandem.comparison.analysis.summary import Summary, speedup
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

    condition: str
    where: str
    rtt_ms: float
    clients: int = 1  # 0: an open loop
    unit: str = FAST


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
    if found.sureness is Sureness.NOISE:
        return f"{at.where}, nothing can be decided: {found.reasons[0]}."
    if chosen in arch.PLAIN:
        return f"{at.where}, {LITTLE if alike else PLAINLY}."
    figure = "" if times is None else f": {times:.2f} {at.unit} {name_in_sentence(over)}"
    if ties:
        names = [name_in_sentence(name) for name in (chosen, *ties)]
        return f"{at.where}, {joined(names, 'or')}, too close to call{figure}."
    return f"{at.where}, {ACTIONS[chosen]}{figure}."


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
