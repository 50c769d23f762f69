"""Ranks where to put the draft, by round trips measured from this machine to servers (`--role advise --ping`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.clients.round_trips import Reached, reached
from tandem.comparison.analysis.advice import Option, advise, basis
from tandem.comparison.analysis.predictions import Model
from tandem.comparison.links.settings import LinkSettings
from tandem.comparison.measuring.architectures import COMPARED
from tandem.comparison.report.formatting import name_in_sentence
from tandem.comparison.report.reading import read_comparison
from tandem.rpc.credentials import Credentials

NONE_ANSWERS = 1


@dataclass(frozen=True, slots=True)
class Placement:
    """A server, with the best that has the draft on this machine, and the best that has none there."""

    server: Reached
    here: Option | None
    there: Option


def ranked(model: Model, mbps: float | None, servers: Sequence[Reached], clients: int) -> list[Placement]:
    """Returns the servers that answer, the one with the least time per token of a draft on this machine first."""
    found = []
    for server in (each for each in servers if not each.failure):
        options = advise(model, LinkSettings(1000 * server.rtt_s, mbps), clients)
        here = next((option for option in options if COMPARED[option.architecture].split), None)
        there = next(option for option in options if not COMPARED[option.architecture].split)
        found.append(Placement(server, here, there))
    return sorted(found, key=lambda each: (each.here or each.there).tpot_s)


def placement_lines(model: Model, mbps: float | None, servers: Sequence[Reached], clients: int = 1) -> Iterator[str]:
    """Says how far each server is, and what is predicted there with the draft on this machine and without."""
    yield "Round trips are measured from this machine, where a draft would run, and times per token predicted:"
    for place, each in enumerate(ranked(model, mbps, servers, clients), 1):
        server = each.server
        spread = f"{1000 * server.least_s:.1f} to {1000 * server.most_s:.1f}"
        yield f"  {place}. {server.address} ({server.service}): {1000 * server.rtt_s:.1f} ms ({spread})"
        best = each.there if each.here is None or each.there.tpot_s < each.here.tpot_s else each.here
        parts = [("draft here", each.here), ("without", each.there)]
        said = [
            f"{what}: {name_in_sentence(option.architecture)}{_length(option)}, {1000 * option.tpot_s:.1f} ms a token"
            for what, option in parts
            if option is not None
        ]
        yield f"     {'; '.join(said)}. Best: {name_in_sentence(best.architecture)}."
    yield from (f"  -  {each.address}: {each.failure}" for each in servers if each.failure)


def _length(option: Option) -> str:
    return f" with {option.length} draft tokens" if option.length else ""


async def run_placements(
    report: Path, addresses: Sequence[str], credentials: Credentials | None = None, clients: int = 1
) -> int:
    """Measures, prints the ranking and returns the exit code: 1 if no server answers. Raises ValueError."""
    if clients < 1:
        raise ValueError(f"clients: {clients} is below 1")
    model, link = basis(read_comparison(report))
    servers = await reached(addresses, credentials)
    print("\n".join(placement_lines(model, link.bandwidth_mbps, servers, clients)))
    return NONE_ANSWERS if all(each.failure for each in servers) else 0
