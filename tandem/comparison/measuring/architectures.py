"""Defines the architectures, and the conditions (link, sampling, rule, load), that a comparison measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tandem.comparison.links.link_settings import LinkSettings
from tandem.speculation.types import GenerationRequest, Rule


@dataclass(frozen=True, slots=True)
class Architecture:
    """One way to split draft and target."""

    name: str
    service: str  # whose Generate clients call
    split: bool = False  # draft and target run apart, and bytes are counted between them


AUTOREGRESSIVE = Architecture("autoregressive", "TargetVerifier")
DISTRIBUTED = Architecture("distributed", "DraftWorker", split=True)
FUSED = Architecture("fused", "FusedSpeculativeServer")
# Plain decoding with copies from the text beside the target, and no draft model: the rival of a remote draft.
LOOKUP = Architecture("lookup", "FusedSpeculativeServer")
# The target drives: it asks a DraftWorker for drafts.
REMOTE_DRAFT = Architecture("remote_draft", "TargetVerifier", split=True)
# Like distributed, with rounds sent ahead of verdicts.
PIPELINED = Architecture("pipelined", "DraftWorker", split=True)
# Like distributed, with a target that does not wait for drafts.
NEVER_WAITING = Architecture("never_waiting", "DraftWorker", split=True)
# Like distributed, drafted by an EAGLE-3 head, which the target's features are sent to.
HEADED = Architecture("distributed_head", "DraftWorker", split=True)
# Plain decoding where the target verifies wider than one token: the baseline of speedups, started when needed.
WIDTH_1 = Architecture("autoregressive_width_1", "TargetVerifier")
# A server of which nothing but the OpenAI API is known: only connected, and only measured.
OPENAI = Architecture("openai", "OpenAI")
PLAIN = (AUTOREGRESSIVE.name, WIDTH_1.name)
# not calibrated: their rounds overlap, or their costs are unknown
NOT_COSTED = (*PLAIN, LOOKUP.name, PIPELINED.name, NEVER_WAITING.name, HEADED.name, OPENAI.name)

DEFAULT: tuple[Architecture, ...] = (AUTOREGRESSIVE, LOOKUP, DISTRIBUTED, NEVER_WAITING, FUSED, REMOTE_DRAFT)
COMPARED: Mapping[str, Architecture] = {a.name: a for a in (*DEFAULT, PIPELINED, HEADED)}
CONNECTABLE: Mapping[str, Architecture] = {**COMPARED, WIDTH_1.name: WIDTH_1}
ASKED: Mapping[str, Architecture] = {**COMPARED, OPENAI.name: OPENAI}  # values of --architectures
SERVED_BY_VLLM: Mapping[str, str] = {  # how vLLM decodes as each
    AUTOREGRESSIVE.name: "plain",
    LOOKUP.name: "its own n-gram",
    FUSED.name: "its own draft_model",
    REMOTE_DRAFT.name: "tandem.vllm.RemoteDrafter, waiting",
    NEVER_WAITING.name: "tandem.vllm.RemoteDrafter, never waiting",
}
BASE, LINK, SAMPLING, LOAD = "base", "link", "sampling", "load"  # what a condition varies


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
    """Returns the base condition, it with each other link, then it with each other temperature and rule."""
    base = Condition("base", BASE, links[0], replace(request, rule=rules[0]))
    conditions = [base, *(replace(base, name=str(link), varies=LINK, link=link) for link in links[1:])]
    for temperature in temperatures or (request.sampling.temperature,):
        for rule in rules if temperature else rules[:1]:
            drawn = replace(request, sampling=replace(request.sampling, temperature=temperature), rule=rule)
            if drawn != base.request:
                name = f"temperature {temperature:g}, {rule.value}"
                conditions.append(replace(base, name=name, varies=SAMPLING, request=drawn))
    return tuple(conditions)
