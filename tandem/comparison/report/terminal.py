"""Prints a comparison: the decision, the tables, failures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from tandem.comparison.analysis.comparison import Comparison, read_comparison
from tandem.comparison.report import sentences, tables
from tandem.comparison.report.tables import Table

TABLE_WIDTH = 130  # columns without a terminal
MOST_ROWS = 30  # of a table; comparison.json has all


def print_comparison(found: Comparison, console: Console) -> None:
    if why := sentences.partial(found):
        console.print(escape(f"PARTIAL: {why}"), style="bold red", highlight=False)
    for line, style in head_lines(found):
        console.print(escape(line), style=style, highlight=False)
    for table in shown_tables(found):
        console.print(rich_table(table))
    for line in (sentences.setting(found), sentences.identity(found), *sentences.drafts(found)):
        console.print(escape(line), style="dim", highlight=False)
    for remark in found.remarks:
        console.print(escape(f"Remark: {remark}"), style="yellow", highlight=False)


def head_lines(found: Comparison) -> Iterator[tuple[str, str]]:
    """Yields the decision, its sureness and its ratios, each line with its style."""
    for caveat in found.caveats:
        yield f"Note: {caveat}", "yellow"
    verdict = found.decision
    if verdict is None:
        yield sentences.undecided(found), "bold"
    else:
        yield verdict.sentence, "bold"
        yield from ((line, "") for line in sentences.doubts(verdict.doubt))
        if verdict.decided:
            yield from ((f"  {line}", "") for line in sentences.ratios(verdict))
    yield from ((f"{other.sentence} ({other.sureness})", "") for other in found.decisions if other is not verdict)
    yield from ((line, "") for line in sentences.not_measured(found))


def shown_tables(found: Comparison) -> Iterator[Table]:
    yield tables.architecture_table(found, found.base)
    several = (tables.link_table, tables.sampling_table, tables.load_table, tables.capacity_table)
    wrong = (tables.divergence_table, tables.failure_table)
    yield from (table for make in (*several, *wrong) if (table := make(found)))


def rich_table(table: Table) -> RichTable:
    """Renders a table; in less room texts fold and figures stay whole."""
    more = len(table.rows) - MOST_ROWS
    note = f"and {more} more, in comparison.json" if more > 0 else table.note
    shown = RichTable(
        title=table.caption,
        title_justify="left",
        caption=note or None,
        caption_justify="left",
        box=box.SIMPLE,
        padding=0,
    )
    for i, head in enumerate(table.heads):
        if i < table.texts:
            shown.add_column(head, overflow="fold", min_width=min(14, max(map(len, head.split("\n")))))
        else:
            shown.add_column(head, justify="right", no_wrap=True)
    for row in table.rows[:MOST_ROWS]:
        shown.add_row(*map(Text, row))
    return shown


def run_advice(report: Path, rtt_ms: float | None = None, clients: int = 1) -> int:
    """Prints the decision for a round trip (None: the base's); returns the exit code. Raises ValueError."""
    found = read_comparison(report)
    verdict = found.decide(rtt_ms, clients)
    if verdict is None:
        print(sentences.undecided(found))
        return 0
    ratios = [f"  {line}" for line in sentences.ratios(verdict)] if verdict.decided else []
    print("\n".join([*found.caveats, verdict.sentence, *sentences.doubts(verdict.doubt), *ratios]))
    return 0
