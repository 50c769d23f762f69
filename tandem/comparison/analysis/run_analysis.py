"""Analyses a finished run: summaries, theory, decision. A part that fails becomes a remark."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tandem.comparison.analysis.decision import decide
from tandem.comparison.analysis.findings import Theory, held_at_0, theory_of
from tandem.comparison.analysis.summary import References, Summary, summarize
from tandem.comparison.measuring.architectures import AUTOREGRESSIVE
from tandem.comparison.measuring.conditions import Condition
from tandem.comparison.measuring.deployment import baseline_of, incomparable
from tandem.comparison.measuring.records import Record
from tandem.comparison.measuring.run import in_order
from tandem.comparison.measuring.run_data import RunData
from tandem.comparison.report.attempt import Attempts
from tandem.comparison.report.files import Comparison, ConditionResult, Partial
from tandem.speculation.types import Rule


def analyse(measured: RunData) -> Comparison:
    """Analyses a run, complete or not. Raises ValueError if no request was measured."""
    if not measured.records:
        raise ValueError("records: no request was measured")
    config, attempts = measured.config, Attempts()
    conditions = [c for c in config.conditions if any(r.condition == c.name for r in measured.records)]
    records = in_order(measured.records, conditions, [e.architecture for e in measured.endpoints], config.prompts)
    results = tuple(
        ConditionResult(c, tuple(_summaries(measured, c, records, attempts)), measured.links.get(c.link))
        for c in conditions
    )
    theory = attempts.of("Theory beside measurement", partial(_theory, measured, conditions, results), None)
    adaptive = config.speculation_length is None
    base = results[0]
    decision = attempts.of("The decision", lambda: decide(base.condition, base.summaries, theory, adaptive), None)
    return Comparison(
        config,
        measured.endpoints,
        tuple(records),
        results,
        measured.machine,
        measured.versions,
        measured.started_at,
        remarks=(
            *incomparable(list(measured.endpoints)),
            *_not_adaptive(measured),
            *(held_at_0(theory) if theory else ()),
            *measured.remarks,
            *attempts.remarks,
        ),
        warm_up_failures=tuple(measured.warm_up_failures.items()),
        theory=theory,
        decision=decision,
        partial=Partial(measured.missing, len(measured.records), measured.planned) if measured.missing else None,
    )


def _summaries(measured: RunData, condition: Condition, records: Sequence[Record], attempts: Attempts) -> list[Summary]:
    own = [record for record in records if record.condition == condition.name]
    baseline = baseline_of(list(measured.endpoints))
    plain = any(e.architecture == AUTOREGRESSIVE for e in measured.endpoints)
    references = References(
        baseline.architecture.name if baseline else None,
        # The rejection rule preserves the distribution, not the tokens.
        AUTOREGRESSIVE.name if plain and condition.rule is Rule.AGREEMENT else None,
    )
    traces = {prompt: trace for (name, prompt), trace in measured.margins.items() if name == condition.name}
    found: list[Summary] = []
    for name in dict.fromkeys(record.architecture for record in own):
        one = partial(summarize, own, references, traces, (name,))
        found += attempts.of(f"The summary of {name} under {condition.name}", one, [])
    return found


def _theory(measured: RunData, conditions: Sequence[Condition], results: Sequence[ConditionResult]) -> Theory | None:
    length = measured.config.speculation_length
    if length is None:
        return None
    summaries = {result.condition.name: result.summaries for result in results}
    return theory_of(conditions, summaries, measured.records, measured.calibrations, length)


def _not_adaptive(measured: RunData) -> list[str]:
    """Names the servers that use a fixed length although auto was requested."""
    fixed = [e for e in measured.endpoints if e.model.draft_name and not e.model.adaptive_speculation_length]
    if measured.config.speculation_length is not None or not fixed:
        return []
    each = ", ".join(f"{e.architecture.name} {e.model.default_speculation_length}" for e in fixed)
    return [f"speculation-length auto: these servers were started with a fixed one: {each}"]
