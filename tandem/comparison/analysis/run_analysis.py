"""Analyses a finished run: summaries, theory, decisions. A part that fails becomes a remark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from tandem.comparison.analysis.capacity import Capacity, capacity
from tandem.comparison.analysis.caveats import caveats
from tandem.comparison.analysis.decision import Decision, decide
from tandem.comparison.analysis.doubt import EARLY_TOKENS, Doubt, Sureness
from tandem.comparison.analysis.evidence import missed
from tandem.comparison.analysis.findings import Theory, held_at_0, theory_of
from tandem.comparison.analysis.metrics import completed
from tandem.comparison.analysis.summary import Summary, summarize
from tandem.comparison.analysis.under_load import UnderLoad, under_load
from tandem.comparison.analysis.verdicts import Statement, Verdict, predicted, verdict
from tandem.comparison.measuring.architectures import AUTOREGRESSIVE
from tandem.comparison.measuring.attempt import tried
from tandem.comparison.measuring.conditions import BASE, LINK, LOAD, Condition
from tandem.comparison.measuring.deployment import baseline_of, incomparable
from tandem.comparison.measuring.record_log import RunData
from tandem.comparison.measuring.records import Record
from tandem.comparison.measuring.traffic import names_of
from tandem.comparison.measuring.workloads import OWN
from tandem.comparison.report.files import Comparison
from tandem.speculation.types import Rule


def analyse(measured: RunData) -> Comparison:
    """Analyses a run, complete or not. Raises ValueError if no request was measured."""
    if not measured.records:
        raise ValueError("records: no request was measured")
    config, remarks = measured.config, list[str]()
    seen = {record.condition for record in measured.records}
    conditions = [c for c in (*config.conditions, *config.load_conditions) if c.name in seen]
    names = (
        [c.name for c in conditions],
        [e.architecture.name for e in measured.endpoints],
        (*(prompt.name for prompt in config.prompts), *names_of(config)),
    )
    part, place, page = ({name: i for i, name in enumerate(of)} for of in names)
    records = sorted(measured.records, key=lambda r: (part[r.condition], place[r.architecture], r.run, page[r.prompt]))
    summaries = {condition.name: _summaries(measured, condition, records, remarks) for condition in conditions}
    theory = tried(remarks, "Theory beside measurement", lambda: _theory(measured, conditions, summaries), None)
    base, adaptive, cores = conditions[0], config.speculation_length is None, measured.machine.usable_cores
    verdicts, statements = _verdicts(measured, conditions, summaries, theory, remarks)
    of_base = next((one for one in verdicts if one.condition == base.name), None)
    decision = tried(
        remarks,
        "The decision",
        lambda: decide(of_base, base, summaries[base.name], theory, adaptive) if of_base else None,
        None,
    )
    loaded = tried(remarks, "The decision under load", lambda: under_load(conditions, summaries, records, cores), None)
    served = tried(remarks, "The capacity", lambda: _capacity(measured, loaded, summaries, theory), None)
    statements += _further(base.name, decision, theory, summaries[base.name], loaded)
    said = [
        *incomparable(list(measured.endpoints)),
        *_not_adaptive(measured),
        *_ended_early(records, any(p.kind in OWN and not p.chat for p in config.prompts)),
        *(held_at_0(theory) if theory else ()),
        *measured.remarks,
        *remarks,
    ]
    found: dict[str, Any] = {"conditions": conditions, "summaries": summaries, "theory": theory, "decision": decision}
    found |= {"verdicts": verdicts, "statements": statements, "caveats": caveats(measured.endpoints)}
    return Comparison(
        **{**vars(measured), **found, "records": records, "remarks": said, "under_load": loaded, "capacity": served}
    )


def _capacity(
    measured: RunData, loaded: UnderLoad | None, summaries: Mapping[str, Sequence[Summary]], theory: Theory | None
) -> Capacity | None:
    """Returns how many clients a target serves, if that was asked for."""
    config = measured.config
    if config.capacity_ms is None:
        return None
    law = theory.model.capacity_gain() if theory else None
    return capacity(config.capacity_ms / 1000, loaded, summaries, law)


def _verdicts(
    measured: RunData,
    conditions: Sequence[Condition],
    summaries: Mapping[str, Sequence[Summary]],
    theory: Theory | None,
    remarks: list[str],
) -> tuple[list[Verdict], list[Statement]]:
    """Returns the verdict on each round trip, and how architectures compare under each condition without a load."""
    verdicts: list[Verdict] = []
    statements: list[Statement] = []
    for condition in conditions:
        if condition.varies == LOAD:
            continue
        decided = partial(verdict, measured, condition, summaries[condition.name], theory)
        if found := tried(remarks, f"The verdict under {condition.name}", decided, None):
            verdicts += [found[0]] if condition.varies in (BASE, LINK) else []
            statements += found[1]
    return verdicts, statements


def _further(
    base: str,
    decision: Decision | None,
    theory: Theory | None,
    summaries: Sequence[Summary],
    loaded: UnderLoad | None,
) -> list[Statement]:
    """Returns the statements on tokens, predictions and loads."""
    checked = [s.identical for s in summaries if s.identical and s.architecture != AUTOREGRESSIVE.name]
    total, same = (sum(getattr(one, which) for one in checked) for which in ("total", "count"))
    counted = Doubt(Sureness.SURE, ("counted, not timed",), ())
    text = f"{same} of {total} outputs have the tokens of plain decoding"
    found = [Statement("tokens", base, text, None, None, counted)] if total else []
    if decision and theory:
        found += [predicted(base, one, missed(theory)) for one in decision.would_change]
    for point in loaded.points if loaded else ():
        if point.best:
            best = point.best
            found.append(Statement("load", point.condition, best.sentence, best.throughput_ratio, None, best.doubt))
    return found


def _ended_early(records: Sequence[Record], raw: bool) -> list[str]:
    """Warns of answers that are too short to be timed. `raw`: there are own prompts outside of the chat template."""
    tokens = [m.output_tokens for m in completed(records)]
    early = sum(count < EARLY_TOKENS for count in tokens)
    if not early:
        return []
    said = (
        f"{early} of {len(tokens)} answers ended under {EARLY_TOKENS} tokens and say little about the time per token."
    )
    hint = " Prompts of your own were given as they are." if raw else ""
    return [f"{said} Ask for longer answers.{hint}"]


def _summaries(measured: RunData, condition: Condition, records: Sequence[Record], remarks: list[str]) -> list[Summary]:
    own = [record for record in records if record.condition == condition.name]
    baseline = baseline_of(list(measured.endpoints))
    has_plain = any(e.architecture.name == AUTOREGRESSIVE.name for e in measured.endpoints)
    faster = baseline.architecture.name if baseline else None
    # The rejection rule preserves the distribution, not the tokens.
    same = AUTOREGRESSIVE.name if has_plain and condition.request.rule is Rule.AGREEMENT else None
    plain = _with_fewest_beside(records) if condition.varies == LOAD else None
    traces = {prompt: trace for (name, prompt), trace in measured.margins.items() if name == condition.name}
    found: list[Summary] = []
    for name in dict.fromkeys(record.architecture for record in own):
        one = partial(summarize, own, faster, same, traces, (name,), plain)
        found += tried(remarks, f"The summary of {name} under {condition.name}", one, [])
    return found


def _with_fewest_beside(records: Sequence[Record]) -> list[Record]:
    """Returns plain decoding's outputs to compare outputs under load with.

    Of each prompt and run the first that was measured: alone if it was, else under the first load. So plain decoding
    under load is compared with plain decoding alone.
    """
    first: dict[tuple[str, int], Record] = {}
    for record in records:
        of_base = record.condition == BASE or record.sent_s is not None
        if of_base and record.architecture == AUTOREGRESSIVE.name and record.measurement:
            first.setdefault((record.prompt, record.run), record)
    return list(first.values())


def _theory(
    measured: RunData, conditions: Sequence[Condition], summaries: Mapping[str, Sequence[Summary]]
) -> Theory | None:
    length = measured.config.speculation_length
    return theory_of(conditions, summaries, measured.records, measured.calibrations, length)


def _not_adaptive(measured: RunData) -> list[str]:
    """Names the servers that use a fixed length although auto was requested."""
    fixed = [e for e in measured.endpoints if e.model.draft_name and not e.model.adaptive_speculation_length]
    if measured.config.speculation_length is not None or not fixed:
        return []
    each = ", ".join(f"{e.architecture.name} {e.model.default_speculation_length}" for e in fixed)
    return [f"speculation-length auto: these servers were started with a fixed one: {each}"]
