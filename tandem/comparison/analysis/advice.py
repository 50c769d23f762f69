"""Recommends what to deploy on a link for a number of clients, from the costs in a comparison.json (`--role advise`).

The target's device is modelled as a queue with a single server: with N clients, the time per token is at least N times
the device's seconds per token. Requests that share steps do better; the comparison does not measure that, and the
advice says so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.comparison.analysis.doubt import Sureness
from tandem.comparison.analysis.findings import model_from_json
from tandem.comparison.analysis.predictions import Model
from tandem.comparison.analysis.prefill_advice import prefill_costs, prefill_document, prefill_lines
from tandem.comparison.links.settings import MAX_RTT_MS, LinkSettings
from tandem.comparison.measuring.architectures import AUTOREGRESSIVE, DISTRIBUTED, LOOKUP, NEVER_WAITING
from tandem.comparison.measuring.distributions import ratio
from tandem.comparison.report.capacity_table import capacity_lines
from tandem.comparison.report.formatting import capitalised, joined, name_in_sentence
from tandem.comparison.report.reading import read_comparison


@dataclass(frozen=True, slots=True)
class Option:
    """An architecture at its best length. `alone_s`: TPOT of a single client; `busy_s`: target seconds per token."""

    architecture: str
    length: int
    alone_s: float
    busy_s: float
    clients: int

    @property
    def tpot_s(self) -> float:
        return max(self.alone_s, self.clients * self.busy_s)

    @property
    def capacity(self) -> int | None:
        """The number of clients that do not wait for each other; None if no busy time of the target was measured."""
        clients = ratio(self.alone_s, self.busy_s)
        return None if clients is None else max(1, math.floor(clients))


def basis(comparison: Mapping[str, Any], rtt_ms: float | None = None) -> tuple[Model, LinkSettings]:
    """Returns the model of a comparison, and its base link with this round trip (None: its own). Raises ValueError."""
    if comparison["theory"] is None:
        raise ValueError(
            "report: it has no costs; compare plain decoding and at least one architecture that drafts in one run"
        )
    link = comparison["conditions"][0]["link"]
    rtt_ms = link["rtt_ms"] if rtt_ms is None else rtt_ms
    return model_from_json(comparison["theory"]), LinkSettings(rtt_ms, link["bandwidth_mbps"])


def advise(model: Model, link: LinkSettings, clients: int = 1) -> tuple[Option, ...]:
    """Returns every measured architecture, and distributed at a target that never waits, best first.

    Lookup, plain decoding with copies from the text, is the one whose gain needs no draft model.
    """
    derived = [NEVER_WAITING.name] if DISTRIBUTED.name in model.drafts else []
    options = [_option(model, name, link, clients) for name in (AUTOREGRESSIVE.name, *model.drafts, *derived)]
    if copying := model.lookup():
        busy = copying.seconds - (model.plain_tpot - model.plain_s)
        options.append(Option(LOOKUP.name, 0, copying.seconds / copying.tokens, busy / copying.tokens, clients))
    return tuple(sorted(options, key=lambda option: option.tpot_s))


def _option(model: Model, name: str, link: LinkSettings, clients: int) -> Option:
    """Returns the option at the best length for this number of clients: shorter drafts load the target less."""
    if name == AUTOREGRESSIVE.name:
        return Option(name, 0, model.plain_tpot, model.plain_s, clients)
    if name == NEVER_WAITING.name:  # its target is always busy
        tpots = {g: model.tpot(name, link, g) for g in model.lengths(DISTRIBUTED.name)[1:]}
        best = min(tpots, key=tpots.__getitem__)
        return Option(name, best, tpots[best], tpots[best], clients)
    options = (
        Option(name, g, model.tpot(name, link, g), model.target_seconds(name, g), clients)
        for g in model.lengths(name)[1:]
    )
    return min(options, key=lambda option: option.tpot_s)


def advice_lines(model: Model, link: LinkSettings, clients: int = 1) -> Iterator[str]:
    """Describes what to deploy, what to expect, and what would change the advice."""
    options = advise(model, link, clients)
    best = options[0]
    who = f"{clients} clients" if clients > 1 else "one client"
    length = f" with speculation length {best.length}" if best.length else ""
    yield f"At {1000 * link.seconds:g} ms round trip and {who}: {name_in_sentence(best.architecture)}{length}."
    yield ""
    for option in options:
        yield _line(option, model)
    yield ""
    yield "What would change this:"
    changes = list(_changes(model, link, best))
    yield from (f"  - {change}" for change in changes or ["Nothing that was measured comes near it."])
    yield ""
    yield (
        "Predicted from the comparison's component times, for speculation lengths that were costed; run the comparison"
        " with --rtt-ms at your round trip to see how far predictions are off. Requests that share steps on the target"
        " do better than the capacity says."
    )


def _line(option: Option, model: Model) -> str:
    name = name_in_sentence(option.architecture)
    at = f"k = {option.length}" if option.length else "k = 0"
    shared = f", {1000 * option.tpot_s:.1f} ms with {option.clients}" if option.clients > 1 else ""
    plural = "client" if option.capacity == 1 else "clients"
    rivals, most = [("plain decoding", model.plain_tpot)], ratio(1.0, option.busy_s)
    if copying := model.lookup():
        rivals.append((LOOKUP.name, copying.seconds / copying.tokens))
    times = [f"{gain:.2f} times {who}" for who, tpot in rivals if (gain := ratio(tpot, option.alone_s)) is not None]
    beside = f" ({' and '.join(times)} alone)" if times else ""
    limit = (
        "no limit was measured"
        if option.capacity is None or most is None
        else f"{option.capacity} {plural} before they wait, at most {most:.0f} tokens/s"
    )
    return (
        f"  {name:15} {at:7} TPOT {1000 * option.alone_s:6.1f} ms alone{shared}{beside},"
        f" target busy {1000 * option.busy_s:.1f} ms a token: {limit}"
    )


def _changes(model: Model, link: LinkSettings, best: Option) -> Iterator[str]:
    yield from _other_links(model, link, best)
    yield from _other_loads(model, link, best)
    if best.architecture in model.drafts:
        least = model.least_tokens_per_round(best.architecture, best.alone_s)
        if least is not None:
            yield (
                f"Other prompts: below about {least:.2f} tokens a round"
                f" ({model.drafts[best.architecture].per_round:.2f} were measured) plain decoding is faster."
            )


def _other_links(model: Model, link: LinkSettings, best: Option) -> Iterator[str]:
    """Describes the round trips at which another architecture becomes the best."""
    for rtt in (*range(0, 300, 1), *range(300, 2001, 50)):
        found = advise(model, LinkSettings(float(rtt), link.bandwidth_mbps), best.clients)[0].architecture
        if found != best.architecture and rtt > 1000 * link.seconds:
            yield f"A round trip of {rtt} ms or more: {name_in_sentence(found)} is then the best."
            break
    if DISTRIBUTED.name in model.drafts and best.architecture != DISTRIBUTED.name:
        even = 1000 * model.break_even_rtt(link)[0]
        if even > 0:
            yield (
                "A target's host that cannot hold the draft: distributed is faster than plain decoding below"
                f" {even:.0f} ms."
            )


def _other_loads(model: Model, link: LinkSettings, best: Option) -> Iterator[str]:
    """Describes the number of clients at which another architecture becomes the best."""
    for clients in range(best.clients + 1, 201):
        found = advise(model, link, clients)[0].architecture
        if found != best.architecture:
            yield f"{clients} clients or more on one target: {name_in_sentence(found)} is then the best."
            return


def _doubts(comparison: Mapping[str, Any]) -> Iterator[str]:
    """Says first if the comparison is not sure of what it measured. An older file says nothing of it."""
    decision = comparison.get("decision") or {}
    if decision.get("sureness", Sureness.SURE.value) != Sureness.SURE.value:
        reasons = joined(decision["reasons"])
        yield f"The comparison that this rests on is {decision['sureness']}: {reasons}."
        yield ""


def _measured_capacity(comparison: Mapping[str, Any]) -> Iterator[str]:
    """Says how many clients a target serves, if the comparison measured it."""
    found = comparison.get("capacity")
    if not found:
        return
    yield ""
    yield "Measured, with a draft for each client where drafts are apart:"
    yield from (f"  - {capitalised(line)}" for line in capacity_lines({"capacity": found}))


def run_advice(
    report: Path,
    rtt_ms: float | None = None,
    clients: int = 1,
    link_mbps: float | None = None,
) -> int:
    """Prints the advice of a report and returns the exit code. Raises ValueError.

    `rtt_ms`: the round trip (None: that of the base). `link_mbps`: the bandwidth between a target and its
    PrefillWorkers, for a report of benchmarks/prefill_apart.py.
    """
    if clients < 1:
        raise ValueError(f"clients: {clients} is below 1")
    if rtt_ms is not None and not 0 <= rtt_ms <= MAX_RTT_MS:
        raise ValueError(f"rtt-ms: {rtt_ms:g} is outside 0 to {MAX_RTT_MS:g}")
    if link_mbps is not None and not 0 < link_mbps < math.inf:
        raise ValueError(f"link_mbps: {link_mbps:g} is not a number above 0")
    if (document := prefill_document(report)) is not None:
        lines = prefill_lines(prefill_costs(document), LinkSettings(rtt_ms, link_mbps))
    elif link_mbps is not None:
        raise ValueError("link_mbps: is for a report of benchmarks/prefill_apart.py; a comparison has its own links")
    else:
        comparison = read_comparison(report)
        lines = itertools.chain(
            _doubts(comparison),
            advice_lines(*basis(comparison, rtt_ms), clients),
            _measured_capacity(comparison),
        )
    print("\n".join(lines))
    return 0
