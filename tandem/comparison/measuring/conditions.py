"""What a comparison varies: the link between client and servers, and how tokens are drawn and verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tandem.comparison.links.settings import LinkSettings
from tandem.speculation.types import Rule, SamplingParams

BASE, LINK, SAMPLING = "base", "link", "sampling"


@dataclass(frozen=True, slots=True)
class LinkChoice:
    """A link between the client's side and the target's. None as `rtt_ms`: nothing is put between."""

    rtt_ms: float | None = None
    bandwidth_mbps: float | None = None

    @property
    def seconds(self) -> float:
        return (self.rtt_ms or 0.0) / 1000

    def transfer(self, payload_bytes: float) -> float:
        """Seconds that a payload takes to be sent."""
        return 0.0 if self.bandwidth_mbps is None else payload_bytes * 8 / (self.bandwidth_mbps * 1e6)

    def round_trip(self, payload_bytes: float) -> float:
        """Seconds that a call and its reply of so many bytes in all are under way."""
        return self.seconds + self.transfer(payload_bytes)

    @property
    def settings(self) -> LinkSettings | None:
        """What to set a link to. Raises ValueError that names the flag."""
        return None if self.rtt_ms is None else LinkSettings(self.rtt_ms, self.bandwidth_mbps)

    def __str__(self) -> str:
        return str(self.settings or "nothing between")


@dataclass(frozen=True, slots=True)
class Condition:
    """One setting that every architecture is measured under. `name` is unique in a comparison."""

    name: str
    varies: str
    link: LinkChoice
    sampling: SamplingParams
    rule: Rule = Rule.AGREEMENT


def plan(
    sampling: SamplingParams,
    rtts_ms: Sequence[float] = (),
    bandwidth_mbps: float | None = None,
    temperatures: Sequence[float] = (),
    rules: Sequence[Rule] = (Rule.AGREEMENT,),
) -> tuple[Condition, ...]:
    """The base first (`sampling`, the first link, the first rule), then every other link, then every other sampling.

    A star, not a grid: links and sampling do not change each other's figures. Greedy tokens are the same under every
    rule, so temperature 0 is measured under the first alone.
    """
    emulated = bool(rtts_ms) or bandwidth_mbps is not None
    links = [LinkChoice(rtt, bandwidth_mbps) for rtt in (rtts_ms or (0.0,))] if emulated else [LinkChoice()]
    base = Condition("base", BASE, links[0], sampling, rules[0])
    conditions = [base, *(replace(base, name=str(link), varies=LINK, link=link) for link in links[1:])]
    for temperature in temperatures or (sampling.temperature,):
        for rule in rules if temperature else rules[:1]:
            drawn = replace(sampling, temperature=temperature)
            if (drawn, rule) != (base.sampling, base.rule):
                name = f"temperature {temperature:g}, {rule.value}"
                conditions.append(replace(base, name=name, varies=SAMPLING, sampling=drawn, rule=rule))
    return tuple(conditions)
