"""Prints a comparison on the terminal."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from functools import partial

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from tandem.comparison.report import terminal_lines as lines
from tandem.comparison.report.attempt import Attempts
from tandem.comparison.report.blocks import Table
from tandem.comparison.report.files import Comparison
from tandem.comparison.report.terminal_tables import (
    architecture_table,
    cause_table,
    load_table,
    prediction_table,
    workload_table,
)

TABLE_WIDTH = 130
"""Columns where there is no terminal to ask."""
STYLES = {"good": "green", "bad": "bold red"}


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Prints the decision, the tables and the remarks. A part that cannot be made is reported; the rest is printed."""
    attempts, base = Attempts(), comparison.base.summaries
    if comparison.partial:
        console.print(escape(f"PARTIAL: {comparison.partial}"), style="bold red", highlight=False)
    if comparison.decision:
        console.print(escape(comparison.decision.headline), style="bold", highlight=False)
    loaded = comparison.under_load
    if loaded and loaded.headline:
        console.print(escape(loaded.headline), style="bold", highlight=False)

    def show(what: str, make: Callable[[], Table]) -> None:
        table = attempts.of(what, lambda: rich_table(make()), None)
        if table is not None:
            console.print(table)

    def say(style: str, what: str, make: Callable[[], Iterable[str]]) -> None:
        none: list[str] = []
        for line in attempts.of(what, lambda: list(make()), none):
            console.print(escape(line), style=style)

    for result in (result for result in comparison.results if result.condition.load is None):
        show(f"The table of {result.condition.name}", partial(architecture_table, comparison, result))
    if loaded:
        show("The table under load", partial(load_table, loaded, comparison.results))
    show("The table by workload", lambda: workload_table(comparison))
    show("The table by cause", lambda: cause_table(base))
    if comparison.theory:
        show("The table of predictions", partial(prediction_table, comparison.theory))
    if loaded:
        say("", "The decisions under load", lambda: (p.best.sentence for p in loaded.points if p.best))
    say("dim", "The settings", lambda: lines.settings(comparison))
    say("dim", "The link measurements", lambda: lines.links(comparison))
    say("dim", "The proposers", lambda: lines.proposers(base))
    say("", "The head beside the draft model", lambda: lines.heads(base))
    say("dim", "The rounds in flight", lambda: lines.rounds_in_flight(base))
    say("dim", "The steps without waiting", lambda: lines.steps_without_waiting(base))
    say("dim", "The draft lengths", lambda: lines.draft_lengths(base))
    say("yellow", "The outputs that differ", lambda: lines.divergences(comparison.results))
    say("yellow", "The remarks", lambda: comparison.remarks)
    say("red", "The failures", lambda: lines.failures(comparison))
    say("yellow", "The parts that could not be shown", lambda: attempts.remarks)


def as_text(comparison: Comparison) -> str:
    """What `print_comparison` prints, without colors."""
    text = io.StringIO()
    print_comparison(comparison, Console(file=text, width=TABLE_WIDTH))
    return text.getvalue()


def rich_table(table: Table) -> RichTable:
    """Renders a table for 80 columns: where there is less room, text folds and figures stay whole."""
    shown = RichTable(title=table.caption, title_justify="left", caption=table.note or None, box=box.SIMPLE, padding=0)
    for column in table.columns:
        if column.numeric:
            shown.add_column(column.heading, justify="right", no_wrap=True)
        else:
            shown.add_column(column.heading, overflow="fold", min_width=14)
    for row in table.rows:
        shown.add_row(*(Text(cell.text, STYLES.get(cell.tone, "")) for cell in row))
    return shown
