"""What the terminal shows at the end of a comparison."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tandem.comparison.analysis.findings import Theory
from tandem.comparison.analysis.predictions import Prediction
from tandem.comparison.analysis.summary import Summary
from tandem.comparison.measuring.architectures import AUTOREGRESSIVE
from tandem.comparison.measuring.conditions import LinkChoice
from tandem.comparison.measuring.deployment import baseline_of
from tandem.comparison.measuring.records import CAUSES, Record
from tandem.comparison.report.attempt import Attempts
from tandem.comparison.report.files import Comparison, ConditionResult
from tandem.speculation.types import Rule

TABLE_WIDTH = 130
"""Columns where there is no terminal to ask."""
SHOWN = 5
"""Failures and divergences listed before the rest is left to comparison.json."""


def print_comparison(comparison: Comparison, console: Console) -> None:
    """What cannot be shown is said; the rest is shown."""
    attempts, base = Attempts(), comparison.base.summaries
    if comparison.partial:
        console.print(escape(f"PARTIAL: {comparison.partial}"), style="bold red", highlight=False)
    if comparison.decision:
        console.print(escape(comparison.decision.headline), style="bold", highlight=False)

    def show(what: str, make: Callable[[], Table]) -> None:
        table: Table | None = attempts.of(what, make, None)
        if table is not None:
            console.print(table)

    def say(style: str, what: str, lines: Callable[[], Iterable[str]]) -> None:
        none: list[str] = []
        for line in attempts.of(what, lambda: list(lines()), none):
            console.print(escape(line), style=style)

    for result in comparison.results:
        show(f"The table of {result.condition.name}", partial(architecture_table, comparison, result))
    show("The table by workload", lambda: workload_table(comparison))
    show("The table by cause", lambda: cause_table(base))
    if comparison.theory:
        show("The table of predictions", partial(prediction_table, comparison.theory))
    say("dim", "What was set", lambda: setting_lines(comparison))
    say("dim", "What the links take", lambda: link_lines(comparison))
    for what, of in (("Proposers", proposer_lines), ("Rounds in flight", ahead_lines), ("Lengths", draft_length_lines)):
        say("dim", what, partial(of, base))
    say("yellow", "Outputs that parted", lambda: divergence_lines(comparison.results))
    say("yellow", "Remarks", lambda: comparison.remarks)
    say("red", "Failures", lambda: failure_lines(comparison))
    say("yellow", "What could not be shown", lambda: attempts.remarks)


def as_text(comparison: Comparison) -> str:
    """What `print_comparison` shows, without colours."""
    text = io.StringIO()
    print_comparison(comparison, Console(file=text, width=TABLE_WIDTH))
    return text.getvalue()


def _table(title: str, first_column: str) -> Table:
    """Narrow enough for 80 columns: where there is less room, names fold and figures stay whole."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=0)
    table.add_column(first_column, overflow="fold", min_width=14)
    return table


def _add_figures(table: Table, *headings: str) -> None:
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)


def architecture_table(comparison: Comparison, result: ConditionResult) -> Table:
    table = _table(_title(comparison, result), "architecture")
    _add_figures(
        table,
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
    baseline = baseline_of(list(comparison.endpoints))
    for summary in result.summaries:
        is_baseline = baseline is not None and summary.architecture == baseline.architecture.name
        table.add_row(
            summary.architecture,
            _number(_scaled(summary.distributions["ttft_s"].p50), 1),
            _number(_scaled(summary.distributions["tpot_s"].p50), 2),
            _number(summary.output_throughput_token_per_s, 1),
            _number(summary.acceptance.acceptance_rate, 3),
            _number(summary.acceptance.mean_acceptance_length, 2),
            str(summary.acceptance.rounds),
            f"{_number(summary.bytes_up_per_token, 1)}/{_number(summary.bytes_down_per_token, 1)}",
            "base" if is_baseline else _times(summary.speedup.speedup if summary.speedup else None),
            _identical(summary),
        )
        if summary.failed:
            table.add_row(f"  [red]{summary.failed} of {summary.requests} failed[/red]")
    return table


def _title(comparison: Comparison, result: ConditionResult) -> str:
    """Conditions are named where there are several; what is emulated is called so."""
    if len(comparison.results) == 1 and result.link is None:
        return "Architectures"
    link = "" if result.link is None else f", {comparison.config.link} {result.condition.link}"
    return f"Architectures: {result.condition.name}{link}"


def prediction_table(theory: Theory) -> Table:
    """Milliseconds per token, predicted from component times beside measured."""
    table = _table("TPOT, ms: predicted / measured (error)", "architecture")
    links = list(dict.fromkeys((p.condition, p.rtt_ms) for p in theory.predictions))
    _add_figures(table, *(f"{condition}" for condition, _ in links))
    for name in dict.fromkeys(p.architecture for p in theory.predictions):
        table.add_row(name, *(_predicted(p) for p in theory.predictions if p.architecture == name))
    return table


def _predicted(prediction: Prediction) -> str:
    predicted = f"{1000 * prediction.predicted_tpot_s:.1f}"
    if prediction.measured_tpot_s is None or prediction.error is None:
        return f"{predicted} (not run)"
    return f"{predicted} / {1000 * prediction.measured_tpot_s:.1f} ({100 * prediction.error:+.1f} %)"


def workload_table(comparison: Comparison) -> Table:
    """Speedup and acceptance rate of everything that is not the baseline."""
    baseline = baseline_of(list(comparison.endpoints))
    skipped = {baseline.architecture.name if baseline else "", AUTOREGRESSIVE.name}
    shown = [summary for summary in comparison.base.summaries if summary.architecture not in skipped]
    table = _table("By workload", "workload")
    for summary in shown:
        _add_figures(table, f"{summary.architecture}\nspeedup", f"{summary.architecture}\naccept rate")
    for kind in dict.fromkeys(prompt.kind for prompt in comparison.config.prompts):
        cells: list[str] = []
        for summary in shown:
            workload = summary.workloads.get(kind)
            cells.append(_times(workload.speedup.speedup if workload else None))
            cells.append(_number(workload.acceptance.acceptance_rate if workload else None, 3))
        table.add_row(kind, *cells)
    return table


def cause_table(summaries: Sequence[Summary]) -> Table:
    table = _table("Milliseconds per token, by cause", "architecture")
    _add_figures(table, *CAUSES)
    clamped = 0
    for summary in summaries:
        clamped += summary.other_clamped
        table.add_row(summary.architecture, *(_number(summary.milliseconds_per_token[cause], 2) for cause in CAUSES))
    if clamped:
        table.caption = f"in {clamped} requests the named causes overlapped, and other was set to 0"
    return table


def setting_lines(comparison: Comparison) -> Iterator[str]:
    config = comparison.config
    models = [endpoint.model for endpoint in comparison.endpoints]
    drafters = dict.fromkeys(model.draft_name for model in models if model.draft_name)
    sampling = config.sampling
    how = "greedy" if sampling.greedy else f"temperature {sampling.temperature:g}, seed {sampling.seed}"
    how += "" if config.rules[0] is Rule.AGREEMENT else f", verified by {config.rules[0].value}"
    yield f"machine: {comparison.machine}"
    yield (
        f"target: {_names(model.model_name for model in models)}; dtype {_names(model.dtype for model in models)}"
        f" on {_names(model.device for model in models)}; drafter: {', '.join(drafters) or 'none'};"
        f" k = {_length(config.speculation_length)}; {how}; {len(config.prompts)} prompts, {_runs(config.num_runs)},"
        f" at most {config.max_new_tokens} tokens each; link: {comparison.link}"
    )
    baseline = baseline_of(list(comparison.endpoints))
    if baseline:
        yield (
            f"speedup: mean TPOT of {baseline.architecture.name} (plain decoding, width {baseline.model.plain_width})"
            " over that of the architecture; identical: to autoregressive (ref);"
            " bytes: between draft and target where they are apart, else at the client"
        )


def link_lines(comparison: Comparison) -> Iterator[str]:
    """What each link was asked for, what it was measured to take, and what making it adds."""
    shown: set[LinkChoice] = set()
    for result in comparison.results:
        link, measured = result.condition.link, result.link
        if measured is not None and link not in shown:
            shown.add(link)
            yield (
                f"{comparison.config.link} {link}: a small message takes {1000 * measured.link_p50_s:.2f} ms there and"
                f" back, {1000 * measured.added_s:.2f} ms more than asked for and the"
                f" {1000 * measured.direct_p50_s:.2f} ms without the link"
            )


def proposer_lines(summaries: Sequence[Summary]) -> Iterator[str]:
    """Who proposed what, where more than one did."""
    for summary in summaries:
        drafted, accepted = summary.acceptance.drafted_by, summary.acceptance.accepted_by
        if len(drafted) > 1:
            parts = (
                f"{who} {accepted.get(who, 0)} of {count} draft tokens ({accepted.get(who, 0) / count:.2f})"
                for who, count in drafted.items()
            )
            yield f"accepted, {summary.architecture}: {', '.join(parts)}"


def ahead_lines(summaries: Sequence[Summary]) -> Iterator[str]:
    """How far ahead of verdicts rounds were sent, and what of it was for nothing."""
    for summary in summaries:
        if (ahead := summary.sent_ahead) is not None:
            yield (
                f"rounds in flight, {summary.architecture}: {ahead.mean_in_flight:.2f} on average, at most"
                f" {ahead.max_in_flight}; sent ahead and right {ahead.guessed_rounds}, stale {ahead.stale_rounds}"
                f" ({ahead.stale_drafts} draft tokens)"
            )


def divergence_lines(results: Sequence[ConditionResult]) -> Iterator[str]:
    for result in results:
        for summary in result.summaries:
            yield from _divergences_of(summary, "" if result is results[0] else f" ({result.condition.name})")


def _divergences_of(summary: Summary, condition: str) -> Iterator[str]:
    found = summary.identical.divergences if summary.identical else ()
    if not found or not summary.identical:
        return
    yield (
        f"{summary.architecture} left the autoregressive output on {len(found)} of {summary.identical.total}"
        f"{condition}:"
    )
    for one in found[:SHOWN]:
        gap = "unknown" if one.logit_gap is None else f"{one.logit_gap:.4g}"
        yield (
            f"  {one.prompt}, run {one.run}, token {one.position}: {one.token} instead of"
            f" {one.autoregressive_token}, logit gap {gap}"
        )
    if len(found) > SHOWN:
        yield f"  and {len(found) - SHOWN} more, in comparison.json"


def failure_lines(comparison: Comparison) -> Iterator[str]:
    for name, failure in comparison.warm_up_failures:
        yield f"{name} failed to warm up: {failure.code}: {failure.message}"
    yield from (_failure_line(record) for record in comparison.failed[:SHOWN])
    if len(comparison.failed) > SHOWN:
        yield f"and {len(comparison.failed) - SHOWN} more failures, in comparison.json"


def _failure_line(record: Record) -> str:
    why = f"{record.error.code}: {record.error.message}" if record.error else ""
    return f"{record.architecture} failed on {record.prompt}, run {record.run}: {why}"


def _length(k: int | None) -> str:
    return "auto" if k is None else str(k)


def draft_length_lines(summaries: Sequence[Summary]) -> Iterator[str]:
    """How long drafts were, where lengths were chosen round by round."""
    for summary in summaries:
        if summary.acceptance.drafted:
            rounds = ", ".join(f"{n}: {count}" for n, count in enumerate(summary.acceptance.rounds_by_length))
            yield (
                f"drafted, {summary.architecture}: {_number(summary.acceptance.mean_draft_length, 2)} tokens a round on"
                f" average; rounds by draft tokens: {rounds}"
            )


def _runs(number: int) -> str:
    return "1 run" if number == 1 else f"{number} runs each"


def _identical(summary: Summary) -> str:
    if summary.architecture == AUTOREGRESSIVE.name:
        return "ref"
    if summary.identical is None or not summary.identical.total:
        return "-"
    color = "green" if summary.identical.count == summary.identical.total else "bold red"
    return f"[{color}]{summary.identical.count}/{summary.identical.total}[/{color}]"


def _scaled(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _names(values: Iterator[str]) -> str:
    return ", ".join(dict.fromkeys(values)) or "unknown"
