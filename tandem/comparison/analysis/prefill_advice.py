"""Says when prefill apart from decode pays, from what `benchmarks/prefill_apart.py` measured (`--role advise`).

A prompt of n tokens that is processed in place alternates with the steps of those that decode: it takes its own chunks
and one step of the others after each, and each of their steps waits for a chunk. Computed apart, it takes the longer of
two times, of its chunks on the other machine and of its pages on the link, since pages travel while later ones are
computed; then a round trip, and what was measured beyond that. Steps of the others wait only for pages to be copied.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tandem.comparison.links.settings import LinkSettings
from tandem.comparison.report.formatting import ms

KEY = "prefill_costs"
PAYS = 0.95
"""The most of the time in place that counts as faster: below what runs on one machine differ by."""


@dataclass(frozen=True, slots=True)
class PrefillCosts:
    """Measured seconds to first token of a prompt: in place and apart, alone and `beside` a request that decodes.

    `gap_s`: between that request's tokens without a new prompt, and with one in place or apart. Raises ValueError.
    """

    prompt_tokens: float
    chunk_tokens: float
    in_place_s: float
    in_place_beside_s: float
    apart_s: float
    apart_beside_s: float
    gap_s: float
    gap_in_place_s: float
    gap_apart_s: float
    bytes_per_token: float

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise ValueError(f"report: {KEY}.{name} is {value!r}, not a number above 0")

    @property
    def prompt_bytes(self) -> float:
        return self.bytes_per_token * self.prompt_tokens

    @property
    def beyond_s(self) -> float:
        """What a prompt apart takes beyond its computation: calls and copies, measured without a link between."""
        return max(0.0, self.apart_beside_s - self.in_place_s)

    def apart_on(self, link: LinkSettings) -> float:
        """Returns the predicted seconds to first token over a link, beside a request that decodes."""
        return max(self.in_place_s, link.transfer(self.prompt_bytes)) + self.beyond_s + link.seconds

    def least_mbps(self, link: LinkSettings) -> float | None:
        """Returns the bandwidth from which on it pays at this round trip; None if it does not at any."""
        left = PAYS * self.in_place_beside_s - self.beyond_s - link.seconds
        return 8 * self.prompt_bytes / left / 1e6 if left >= self.in_place_s else None

    @property
    def keeps_up_mbps(self) -> float:
        """The bandwidth from which on the link is not what a prompt waits for."""
        return 8 * self.prompt_bytes / self.in_place_s / 1e6


def prefill_costs(document: Mapping[str, Any]) -> PrefillCosts:
    """Reads the costs of a benchmark's file. Raises ValueError."""
    names, given = {field.name for field in fields(PrefillCosts)}, document.get(KEY)
    if not isinstance(given, Mapping) or names - set(given):
        raise ValueError(f"report: it has no {KEY}; benchmarks/prefill_apart.py measures them")
    return PrefillCosts(**{name: given[name] for name in names})


def prefill_document(report: Path) -> Mapping[str, Any] | None:
    """Returns a file of the benchmark; None if it is something else, such as a comparison."""
    try:
        document = json.loads(report.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) and KEY in document else None


def prefill_lines(costs: PrefillCosts, link: LinkSettings) -> Iterator[str]:
    """Describes whether it pays on a link, what to expect, and what would change that."""
    there, here = costs.apart_on(link), costs.in_place_beside_s
    sooner, calmer = there < PAYS * here, costs.gap_apart_s < PAYS * costs.gap_in_place_s
    width = "no limit of bandwidth" if link.bandwidth_mbps is None else f"{link.bandwidth_mbps:g} Mbit/s"
    yield f"At {1000 * link.seconds:g} ms round trip and {width}: {_verdict(sooner, calmer)}."
    yield ""
    yield (
        f"  first token of a prompt of {costs.prompt_tokens:g} tokens, beside a request that decodes:"
        f" {ms(here)} in place, {ms(there)} apart"
    )
    yield (
        f"  gaps of that request meanwhile: {ms(costs.gap_in_place_s)} in place, {ms(costs.gap_apart_s)} apart,"
        f" {ms(costs.gap_s)} without a prompt"
    )
    megabytes, transfer, compute = costs.prompt_bytes / 1e6, link.transfer(costs.prompt_bytes), costs.in_place_s
    yield f"  its pages: {megabytes:.1f} MB, {ms(transfer)} on the link, {ms(compute)} to compute"
    yield ""
    yield "What would change this:"
    yield from (f"  - {change}" for change in _changes(costs, link))
    yield ""
    yield (
        "Predicted from one run's medians, for prompts of that length with one request beside them; the gaps are as"
        " measured without a link. The other machine computes as fast as this one did; one that is faster moves the"
        " time to compute, and with it the bandwidth that keeps up."
    )


def _verdict(sooner: bool, calmer: bool) -> str:
    if sooner and calmer:
        return "prefill apart pays, in time to first token and in the gaps of others"
    if calmer:
        return "prefill apart pays in the gaps of others, not in time to first token"
    return "prefill apart pays in time to first token alone" if sooner else "prefill in place; apart does not pay"


def _changes(costs: PrefillCosts, link: LinkSettings) -> Iterator[str]:
    least = costs.least_mbps(link)
    if least is None:
        yield "No bandwidth makes the first token come sooner at this round trip."
    else:
        yield f"Bandwidth: from {least:.0f} Mbit/s on, the first token comes sooner than in place."
    yield f"Bandwidth: below {costs.keeps_up_mbps:.0f} Mbit/s a prompt waits for the link, not for its computation."
    yield (
        f"Load: a PrefillWorker on such a machine computes at most {1 / costs.in_place_s:.1f} such prompts per second;"
        " further ones wait, or are processed in place."
    )
    yield "Machines: with few long prompts, a second target, which also decodes, is the better use of a second machine."
