"""Builds the tables for the terminal: the report's figures, in 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.comparison.analysis.findings import Theory
from tandem.comparison.analysis.predictions import Prediction
from tandem.comparison.analysis.summary import Summary
from tandem.comparison.analysis.under_load import UnderLoad
from tandem.comparison.measuring.architectures import AUTOREGRESSIVE
from tandem.comparison.measuring.deployment import baseline_of
from tandem.comparison.measuring.records import CAUSES
from tandem.comparison.report import formatting as fmt
from tandem.comparison.report.blocks import Cell, Column, Table, table
from tandem.comparison.report.files import Comparison, ConditionResult

HEADINGS = (
    "TTFT\np50 ms",
    "TPOT\np50 ms",
    "tokens\n/s",
    "accept\nrate",
    "mean\naccept\nlength",
    "rounds",
    "bytes/tok\nup/down",
    "speed\nup",
    "iden-\ntical",
)


def architecture_table(comparison: Comparison, result: ConditionResult) -> Table:
    """Latency, throughput, acceptance, traffic, speedup and identity of every architecture under one condition."""
    baseline = baseline_of(list(comparison.endpoints))
    rows: list[list[Cell | str]] = []
    for summary in result.summaries:
        is_baseline = baseline is not None and summary.architecture == baseline.architecture.name
        up, down = summary.bytes_up_per_token, summary.bytes_down_per_token
        rows.append(
            [
                summary.architecture,
                fmt.milliseconds(summary.distributions["ttft_s"].p50),
                fmt.milliseconds(summary.distributions["tpot_s"].p50, 2),
                fmt.number(summary.output_throughput_token_per_s, 1),
                fmt.number(summary.acceptance.acceptance_rate, 3),
                fmt.number(summary.acceptance.mean_acceptance_length),
                str(summary.acceptance.rounds),
                f"{fmt.number(up, 1)}/{fmt.number(down, 1)}",
                "base" if is_baseline else fmt.times(summary.speedup.speedup if summary.speedup else None),
                _identical(summary),
            ]
        )
        if summary.failed:
            failed = Cell(f"  {summary.failed} of {summary.requests} failed", tone="bad")
            rows.append([failed, *[""] * len(HEADINGS)])
    return table(_title(comparison, result), [Column("architecture", False), *map(Column, HEADINGS)], rows)


def _title(comparison: Comparison, result: ConditionResult) -> str:
    """Names the condition if there are several, and the link if it is emulated."""
    if len(comparison.results) == 1 and result.link is None:
        return "Architectures"
    link = "" if result.link is None else f", {comparison.config.link} {result.condition.link}"
    return f"Architectures: {result.condition.name}{link}"


def _identical(summary: Summary) -> Cell:
    found = summary.identical
    if summary.architecture == AUTOREGRESSIVE.name:
        return Cell("ref")
    if found is None or not found.total:
        return Cell(fmt.MISSING)
    return Cell(f"{found.count}/{found.total}", tone="good" if found.count == found.total else "bad")


def prediction_table(theory: Theory) -> Table:
    """Milliseconds per token, predicted from component times beside measured."""
    conditions = list(dict.fromkeys((p.condition, p.rtt_ms) for p in theory.predictions))
    return table(
        "TPOT, ms: predicted / measured (error)",
        [Column("architecture", False), *(Column(condition) for condition, _ in conditions)],
        [
            [name, *(_predicted(p) for p in theory.predictions if p.architecture == name)]
            for name in dict.fromkeys(p.architecture for p in theory.predictions)
        ],
    )


def _predicted(prediction: Prediction) -> str:
    predicted = fmt.milliseconds(prediction.predicted_tpot_s)
    if prediction.measured_tpot_s is None or prediction.error is None:
        return f"{predicted} (not run)"
    error = fmt.percent(prediction.error, 1, sign=True)
    return f"{predicted} / {fmt.milliseconds(prediction.measured_tpot_s)} ({error})"


def workload_table(comparison: Comparison) -> Table:
    """Speedup and acceptance rate by workload, of all architectures but the baseline."""
    baseline = baseline_of(list(comparison.endpoints))
    skipped = {baseline.architecture.name if baseline else "", AUTOREGRESSIVE.name}
    shown = [summary for summary in comparison.base.summaries if summary.architecture not in skipped]
    rows = []
    for kind in dict.fromkeys(prompt.kind for prompt in comparison.config.prompts):
        row = [kind]
        for summary in shown:
            workload = summary.workloads.get(kind)
            row.append(fmt.times(workload.speedup.speedup if workload else None))
            row.append(fmt.number(workload.acceptance.acceptance_rate if workload else None, 3))
        rows.append(row)
    heads = [Column(f"{s.architecture}\n{what}") for s in shown for what in ("speedup", "accept rate")]
    return table("By workload", [Column("workload", False), *heads], rows)


def cause_table(summaries: Sequence[Summary]) -> Table:
    """Milliseconds per output token, by cause."""
    clamped = sum(summary.other_clamped for summary in summaries)
    return table(
        "Milliseconds per token, by cause",
        [Column("architecture", False), *map(Column, CAUSES)],
        [[s.architecture, *(fmt.number(s.milliseconds_per_token[cause]) for cause in CAUSES)] for s in summaries],
        f"in {clamped} requests the named causes overlapped, and other was set to 0" if clamped else "",
    )


LOAD_HEADINGS = (
    "tokens\n/s",
    "requests\n/min",
    "TTFT\np50 ms",
    "TPOT\np50 ms",
    "E2E\np50 ms",
    "errors",
    "iden-\ntical",
)


def load_table(found: UnderLoad, results: Sequence[ConditionResult]) -> Table:
    """Throughput and latency of every architecture under each load; `*` is the one to use."""
    summaries = {(r.condition.name, s.architecture): s for r in results for s in r.summaries}
    rows: list[list[Cell | str]] = []
    for point in found.points:
        rows.append([Cell(f"{point.load}:"), *[""] * len(LOAD_HEADINGS)])
        for name, of in point.figures.items():
            summary = summaries[point.condition, name]
            times = [summary.distributions[key].p50 for key in ("ttft_s", "tpot_s", "end_to_end_latency_s")]
            same = summary.identical
            rows.append(
                [
                    f"{'* ' if point.best and point.best.architecture == name else '  '}{name}",
                    fmt.number(of.mean_output_throughput_token_per_s, 1),
                    fmt.number(of.num_completed_requests_per_minute, 1),
                    *(fmt.milliseconds(seconds) for seconds in times),
                    Cell(str(of.number_errors), tone="bad" if of.number_errors else ""),
                    Cell(f"{same.count}/{same.total}", tone="good" if same.count == same.total else "bad")
                    if same and same.total
                    else Cell(fmt.MISSING),
                ]
            )
    note = "* the most tokens/s, and the least latency of those within 3 %; identical: to plain decoding alone"
    return table("Under load", [Column("architecture", False), *map(Column, LOAD_HEADINGS)], rows, note)
