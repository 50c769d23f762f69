"""The conditions of a comparison: link, sampling, rule, load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tandem.comparison.links.link_settings import LinkSettings
from tandem.speculation.types import GenerationRequest, Rule

BASE, LINK, SAMPLING, LOAD = "base", "link", "sampling", "load"


@dataclass(frozen=True, slots=True)
class Load:
    """One load point with either `concurrency` or `rate`."""

    requests: int
    concurrency: int | None = None  # users in a closed loop
    rate: float | None = None  # requests per second: an open loop of Poisson arrivals

    @property
    def name(self) -> str:
        return f"concurrency {self.concurrency}" if self.rate is None else f"rate {self.rate:g}/s"

    def __str__(self) -> str:
        return f"{self.concurrency} at once" if self.rate is None else f"{self.rate:g} requests/s"


@dataclass(frozen=True, slots=True)
class Condition:
    """One combination of link, sampling, rule and load."""

    name: str  # unique in a comparison
    varies: str
    link: LinkSettings
    request: GenerationRequest  # template; the prompt is filled in per request
    load: Load | None = None  # None: one request at a time

    def under(self, load: Load) -> Condition:
        return replace(self, name=load.name, varies=LOAD, load=load)


def plan(
    request: GenerationRequest,
    links: Sequence[LinkSettings] = (LinkSettings(),),
    temperatures: Sequence[float] = (),
    rules: Sequence[Rule] = (Rule.AGREEMENT,),
) -> tuple[Condition, ...]:
    """Returns the base, then every other link, then every other sampling: the two do not affect each other."""
    base = Condition("base", BASE, links[0], replace(request, rule=rules[0]))
    conditions = [base, *(replace(base, name=str(link), varies=LINK, link=link) for link in links[1:])]
    for temperature in temperatures or (request.sampling.temperature,):
        for rule in rules if temperature else rules[:1]:
            drawn = replace(request, sampling=replace(request.sampling, temperature=temperature), rule=rule)
            if drawn != base.request:
                name = f"temperature {temperature:g}, {rule.value}"
                conditions.append(replace(base, name=name, varies=SAMPLING, request=drawn))
    return tuple(conditions)
