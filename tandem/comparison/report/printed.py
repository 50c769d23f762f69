"""Prints a comparison: the decision, the tables, failures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from tandem.comparison.analysis.comparison import Comparison, comparison_as_text, read_comparison
from tandem.comparison.report import sentences, serving, tables
from tandem.comparison.report.tables import Table

TABLE_WIDTH = 130  # columns without a terminal
MOST_ROWS = 30  # of a table; comparison.json has all
SERVE = "Serve it: "
NAME = 14  # columns of an architecture's name
INTERVAL = r" \([\d.]+ to [\d.]+\)"
Detail = Literal["decision", "short", "all", "json"]


def print_comparison(found: Comparison, console: Console, detail: Detail = "short") -> None:
    if detail == "json":
        print(comparison_as_text(found), end="", file=console.file)
        return
    if why := sentences.partial(found):
        console.print(escape(f"PARTIAL: {why}"), style="bold red", highlight=False)
    for line, style in head_lines(found, detail):
        console.print(escape(line), style=style, highlight=False, soft_wrap=line.startswith(SERVE))  # one to copy
    if detail == "decision":
        return
    for table in shown_tables(found):
        console.print(rich_table(table, console.width, notes=detail == "all"))
    more = sentences.drafts(found) if detail == "all" else ()
    for line in (f"{sentences.setting(found)}. {sentences.identity(found)}", *more):
        console.print(escape(line), style="dim", highlight=False)
    for remark in found.remarks:
        console.print(escape(f"Remark: {remark}"), style="yellow", highlight=False)


def head_lines(found: Comparison, detail: Detail) -> Iterator[tuple[str, str]]:
    """Yields the decision, its sureness and the command that serves it, each line with its style."""
    for caveat in found.caveats:
        yield f"Note: {caveat}", "yellow"
    verdict = found.decision
    if verdict is None:
        yield sentences.undecided(found), "bold"
    else:
        yield verdict.sentence, "bold"
        yield from ((line, "") for line in sentences.doubts(verdict))
        if verdict.decided and detail == "all":
            yield from ((f"  {line}", "") for line in sentences.ratios(verdict))
        if verdict.decided and detail != "decision":
            yield from ((f"{SERVE}{line}", "") for line in serving.served(found, verdict.architecture))
    yield from ((f"{other.sentence} ({other.sureness})", "") for other in found.decisions if other is not verdict)
    yield from ((line, "") for line in sentences.not_measured(found))


def shown_tables(found: Comparison) -> Iterator[Table]:
    yield tables.architecture_table(found, found.base)
    several = (tables.link_table, tables.sampling_table, tables.load_table, tables.capacity_table)
    wrong = (tables.divergence_table, tables.failure_table)
    yield from (table for make in (*several, *wrong) if (table := make(found)))


def rich_table(table: Table, width: int, notes: bool = True) -> RichTable:
    """Renders a table in `width` columns: without room, intervals go first, then columns from the right."""
    shown = table
    if _least_width(shown) > width:
        rows = tuple(tuple(re.sub(INTERVAL, "", cell) for cell in row) for row in table.rows)
        shown = replace(table, heads=tuple(head.replace(" (95 % interval)", "") for head in table.heads), rows=rows)
    while _least_width(shown) > width and len(shown.heads) > shown.texts:
        shown = replace(shown, heads=shown.heads[:-1], rows=tuple(row[:-1] for row in shown.rows))
    said = [table.note] if notes and table.note else []
    if shown is not table:
        said.append("The report has the intervals and all columns.")
    if len(table.rows) > MOST_ROWS:
        said.append(f"and {len(table.rows) - MOST_ROWS} more, in comparison.json")
    made = RichTable(
        title=table.caption,
        title_justify="left",
        caption=" ".join(said) or None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        show_edge=False,
    )
    for head, least in zip(shown.heads, _least_widths(shown), strict=True):
        if len(made.columns) < table.texts:
            made.add_column(head, overflow="fold", min_width=least)
        else:
            made.add_column(head, justify="right", width=least)
    for row in shown.rows[:MOST_ROWS]:
        made.add_row(*map(Text, row))
    return made


def _least_widths(table: Table) -> list[int]:
    """Texts may fold below NAME columns; figures may not, and their heads between words, into two lines."""
    found = []
    for i, head in enumerate(table.heads):
        longest = max((len(row[i]) for row in table.rows[:MOST_ROWS]), default=0)
        found.append(
            min(NAME, longest) if i < table.texts else max([longest, (len(head) + 1) // 2, *map(len, head.split())])
        )
    return found


def _least_width(table: Table) -> int:
    return sum(_least_widths(table)) + len(table.heads) - 1


def run_advice(report: Path, rtt_ms: float | None = None, clients: int = 1) -> int:
    """Prints the decision for a round trip (None: the base's); returns the exit code. Raises ValueError."""
    found = read_comparison(report)
    verdict = found.decide(rtt_ms, clients)
    if verdict is None:
        print(sentences.undecided(found))
        return 0
    ratios = [f"  {line}" for line in sentences.ratios(verdict)] if verdict.decided else []
    print("\n".join([*found.caveats, verdict.sentence, *sentences.doubts(verdict), *ratios]))
    return 0
