"""The result of a comparison, computed from records and encoded in comparison.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tandem.comparison.analysis import words
from tandem.comparison.analysis.capacity import ClientsServed, capacity
from tandem.comparison.analysis.summary import Summary, completed, summarize
from tandem.comparison.analysis.verdict import Decision, host_of, loaded_decision, measured_decision, predicted_decision
from tandem.comparison.analysis.words import joined, name_in_sentence, plural
from tandem.comparison.links.link import LinkOverhead
from tandem.comparison.links.link_settings import MAX_RTT_MS, LinkSettings
from tandem.comparison.measuring.architectures import AUTOREGRESSIVE, BASE, LINK, LOAD, SAMPLING, Condition, Load
from tandem.comparison.measuring.attempt import tried
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.deployment import Endpoint, baseline_of
from tandem.comparison.measuring.json_form import decoded, encoded, read_text
from tandem.comparison.measuring.machine import Machine
from tandem.comparison.measuring.record_log import RunData
from tandem.comparison.measuring.records import Failure, Record
from tandem.comparison.measuring.workloads import OWN
from tandem.speculation.types import Rule, SamplingParams

SCHEMA_VERSION = 5  # raised when an older comparison.json no longer fits these types
EARLY_TOKENS = 8  # a shorter answer has next to no time per token
SETTINGS = ("backend", "device", "dtype", "kv_slots", "max_sequence_length", "plain_width")  # of a server's description


@dataclass(frozen=True, slots=True)
class Measured:
    name: str
    varies: str
    link: LinkSettings
    sampling: SamplingParams
    rule: Rule
    load: Load | None
    overhead: LinkOverhead | None  # of an emulated link
    summaries: tuple[Summary, ...]
    decision: Decision | None  # None: too few architectures answered

    @property
    def rtt_ms(self) -> float:
        return 1000 * self.link.seconds

    def of(self, architecture: str) -> Summary | None:
        return next((s for s in self.summaries if s.architecture == architecture), None)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Measurements and their analysis. `print` shows the decisions and the times per token."""

    schema_version: int
    started_at: str
    missing: str | None  # why measurements are missing; None if complete
    planned: int
    config: ComparisonConfig
    machine: Machine
    endpoints: tuple[Endpoint, ...]
    warm_up_failures: Mapping[str, Failure]
    baseline: str | None  # plain decoding that speedups refer to
    conditions: tuple[Measured, ...]  # the base first
    capacity: tuple[ClientsServed, ...]  # within config.capacity; empty if none was asked for
    caveats: tuple[str, ...]
    remarks: tuple[str, ...]
    records: tuple[Record, ...]

    def __str__(self) -> str:
        times = (f"{s.architecture}: {words.milliseconds(s.tpot_s, 2)} ms a token" for s in self.base.summaries)
        return "\n".join([*(f"{decision.sentence} ({decision.sureness})" for decision in self.decisions), *times])

    @property
    def base(self) -> Measured:
        return self.conditions[0]

    @property
    def links(self) -> list[Measured]:
        """The base and the conditions that differ only in the link, by round trip."""
        return sorted((m for m in self.conditions if m.varies in (BASE, LINK)), key=lambda m: m.rtt_ms)

    @property
    def samplings(self) -> list[Measured]:
        """The base and the conditions with other sampling or rules; empty without any."""
        found = [m for m in self.conditions if m.varies == SAMPLING]
        return [self.base, *found] if found else []

    @property
    def loads(self) -> list[Measured]:
        return [m for m in self.conditions if m.load]

    @property
    def decision(self) -> Decision | None:
        return self.base.decision

    @property
    def decisions(self) -> list[Decision]:
        """Those of every link, then of every load."""
        return [m.decision for m in (*self.links, *self.loads) if m.decision]

    @property
    def failed(self) -> tuple[Record, ...]:
        return tuple(record for record in self.records if record.error)

    @property
    def rehearsed(self) -> bool:
        """Whether servers took another device's step times."""
        return any(endpoint.model.rehearsals for endpoint in self.endpoints)

    @property
    def architectures(self) -> list[str]:
        return list(dict.fromkeys(s.architecture for m in self.conditions for s in m.summaries))

    def decide(self, rtt_ms: float | None = None, clients: int = 1) -> Decision | None:
        """Decides from measurements, else predictions, for a round trip (None: the base's) and a number of clients.

        Returns None with too few architectures. Raises ValueError.
        """
        if clients < 1:
            raise ValueError(f"clients: {clients} is below 1")
        if rtt_ms is not None and not 0 <= rtt_ms <= MAX_RTT_MS:
            raise ValueError(f"rtt-ms: {rtt_ms:g} is outside 0 to {MAX_RTT_MS:g}")
        at = self.base.rtt_ms if rtt_ms is None else rtt_ms
        for decision in self.decisions:
            if (decision.rtt_ms, decision.clients) == (at, clients):
                return decision
        links = [(m.rtt_ms, m.summaries) for m in self.links if m.link.predictable]
        return predicted_decision(links, [m.decision for m in self.links if m.decision], at, clients)


def analyse(measured: RunData) -> Comparison:
    """Analyses a run; a failing part becomes a remark. Raises ValueError without a record."""
    if not measured.records:
        raise ValueError("records: no request was measured")
    config, remarks, cores = measured.config, list[str](), measured.machine.usable_cores
    records, endpoints = _in_order(measured), measured.endpoints
    seen = {record.condition for record in records}
    conditions = [c for c in (*config.conditions, *config.load_conditions) if c.name in seen]
    baseline = baseline_of(list(endpoints))
    plain = baseline.architecture.name if baseline else None
    summaries = {c.name: tuple(_summaries(measured, c, records, plain, remarks)) for c in conditions}

    def decided(on: Condition) -> Measured:
        request, link, found = on.request, on.link, summaries[on.name]
        if on.load:
            decide = partial(loaded_decision, on, on.load, found, records)
        else:
            decide = partial(measured_decision, on, found, records, endpoints, cores)
        decision = tried(remarks, f"The decision under {on.name}", decide, None)
        overhead = measured.links.get(link)
        return Measured(on.name, on.varies, link, request.sampling, request.rule, on.load, overhead, found, decision)

    served: tuple[ClientsServed, ...] = ()
    if config.capacity is not None:
        loads = [(c.load.concurrency, summaries[c.name]) for c in conditions if c.load and c.load.concurrency]
        counted = partial(capacity, config.capacity / 1000, loads)
        served = tried(remarks, "The capacity", counted, ())
    return Comparison(
        SCHEMA_VERSION,
        measured.started_at,
        measured.missing,
        measured.planned,
        config,
        measured.machine,
        endpoints,
        measured.warm_up_failures,
        plain,
        tuple(map(decided, conditions)),
        served,
        tuple(caveats(endpoints)),
        (*_remarks(measured), *measured.remarks, *remarks),
        tuple(records),
    )


def read_comparison(path: Path, flag: str = "report") -> Comparison:
    """Reads a comparison.json. Raises a one-line ValueError."""
    try:
        found = json.loads(read_text(path, flag))
    except json.JSONDecodeError as error:
        raise ValueError(f"{flag}: {path} cannot be read: {error}") from None
    version = found.get("schema_version") if isinstance(found, dict) else None
    if version != SCHEMA_VERSION:
        raise ValueError(f"{flag}: {path} has schema version {version}, and {SCHEMA_VERSION} is needed: measure again")
    try:
        return decoded(Comparison, found)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{flag}: {path} is not what this version writes: {' '.join(str(error).split())}") from None


def comparison_as_text(comparison: Comparison) -> str:
    return json.dumps(encoded(comparison), indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def _in_order(measured: RunData) -> list[Record]:
    config, records = measured.config, measured.records
    conditions = [c.name for c in (*config.conditions, *config.load_conditions)]
    names = [e.architecture.name for e in measured.endpoints]
    prompts = {name: place for place, name in enumerate(dict.fromkeys(record.prompt for record in records))}

    def place(record: Record) -> tuple[int, int, int, int]:
        at = conditions.index(record.condition), names.index(record.architecture)
        return *at, record.run, prompts[record.prompt]

    return sorted(records, key=place)


def _summaries(
    measured: RunData, on: Condition, records: Sequence[Record], baseline: str | None, remarks: list[str]
) -> list[Summary]:
    own = [record for record in records if record.condition == on.name]
    if on.request.rule is not Rule.AGREEMENT:  # the rejection rule preserves the distribution, not the tokens
        plain = []
    elif on.varies == LOAD:
        plain = _plain_with_fewest_beside(records)
    else:
        plain = [record for record in own if record.architecture == AUTOREGRESSIVE.name]
    traces = {prompt: trace for (name, prompt), trace in measured.margins.items() if name == on.name}
    made = (
        tried(remarks, f"The summary of {name}", partial(summarize, name, own, baseline, plain, traces), None)
        for name in dict.fromkeys(record.architecture for record in own)
    )
    return [summary for summary in made if summary]


def _plain_with_fewest_beside(records: Sequence[Record]) -> list[Record]:
    """Returns plain decoding's outputs alone, else under the first load, as reference for loads."""
    first: dict[tuple[str, int], Record] = {}
    for record in records:
        of_base = record.condition == BASE or record.sent_s is not None
        if of_base and record.architecture == AUTOREGRESSIVE.name and record.measurement:
            first.setdefault((record.prompt, record.run), record)
    return list(first.values())


def _remarks(measured: RunData) -> Iterator[str]:
    """Yields why figures or outputs may not be comparable, or say little."""
    config, endpoints = measured.config, measured.endpoints
    for field in ("weights_revision", "tokenizer_sha256", "dtype", "device"):
        values = {e.architecture.name: getattr(e.model, field) for e in endpoints if getattr(e.model, field)}
        if len(set(values.values())) > 1:
            yield f"{field} differs: " + ", ".join(f"{name} {value}" for name, value in values.items())
    if config.over_http:
        yield "vLLM's plain texts may differ from one request to the next: outputs that differ may be its own doing."
    if inexact := [e.architecture.name for e in endpoints if not e.model.bit_exact]:
        yield f"not bit-exact on this device, outputs may differ where logits tie: {', '.join(inexact)}"
    fixed = [e for e in endpoints if e.model.draft_name and not e.model.adaptive_speculation_length]
    if config.speculation_length is None and fixed:
        each = ", ".join(f"{e.architecture.name} {e.model.default_speculation_length}" for e in fixed)
        yield f"speculation-length auto: these servers were started with a fixed one: {each}"
    tokens = [m.output_tokens for m in completed(measured.records)]
    if early := sum(count < EARLY_TOKENS for count in tokens):
        raw = any(prompt.kind in OWN and not prompt.chat for prompt in config.prompts)
        hint = " Prompts of your own were given as they are (--raw, or the model has no chat template)." if raw else ""
        yield (
            f"{early} of {len(tokens)} answers ended under {EARLY_TOKENS} tokens and say little about the time per"
            f" token. Ask for longer answers.{hint}"
        )


def caveats(endpoints: Sequence[Endpoint]) -> Iterator[str]:
    """Yields the caveats before any figure: rehearsed steps, unequal servers."""
    if of := [each for endpoint in endpoints for each in endpoint.model.rehearsals]:
        steps, late = sum(each.steps for each in of), sum(each.late_steps for each in of)
        by = f", by {1000 * sum(each.late_seconds for each in of) / late:.1f} ms on average" if late else ""
        drafts = " (drafts; those of targets are in their logs)" if all(each.part == "draft" for each in of) else ""
        yield (
            f"Rehearsed: real models and a real wire, with steps that take the times of {of[0].device}"
            f" ({of[0].source}), not this machine's; {late} of {plural(steps, 'step')} were late{by}{drafts}."
        )
    given = [e for e in endpoints if e.log is None]
    hosts = list(dict.fromkeys(host_of(e) for e in endpoints))
    mixed = 0 < len(given) < len(endpoints)
    if mixed:
        ran = joined([f"{name_in_sentence(e.architecture.name)} at {e.address}" for e in given])
        yield (
            f"{ran} ran already, other servers were started here: processor, threads and prefix sharing may differ."
            " Connect all of them, or none."
        )
    if len(hosts) > 1:
        yield f"More than one machine is compared ({joined(hosts)}): a ratio may be that of the machines."
    elif hosts and hosts[0] != "this machine":
        yield f"All servers ran on {hosts[0]}: how busy that machine was is not known here."
    if (mixed or hosts not in ([], ["this machine"])) and (apart := _differing(endpoints)):
        yield f"The servers' settings differ: {apart}."


def _differing(endpoints: Sequence[Endpoint]) -> str:
    parts: list[str] = []
    for field in SETTINGS:
        values: dict[str, list[str]] = {}
        for e in endpoints:
            values.setdefault(str(getattr(e.model, field)), []).append(name_in_sentence(e.architecture.name))
        if len(values) > 1:
            each = "; ".join(f"{value} at {joined(names)}" for value, names in values.items())
            parts.append(f"{field.replace('_', ' ')} ({each})")
    return ", ".join(parts)
