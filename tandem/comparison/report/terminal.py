"""Prints a comparison on the terminal, from its comparison.json."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text as RichText

from tandem.comparison.report import reading
from tandem.comparison.report.blocks import Table, Text
from tandem.comparison.report.reading import JSON
from tandem.comparison.report.sections import terminal_blocks

TABLE_WIDTH = 130
"""Columns where there is no terminal to ask."""
CELLS = {"good": "green", "bad": "bold red"}
LINES = {"quiet": "dim", "warning": "yellow", "bad": "red"}


def print_comparison(comparison: JSON, console: Console) -> None:
    """Prints the decision, the tables and the remarks. A part that cannot be made is reported; the rest is printed."""
    if partial_run := reading.partial(comparison):
        console.print(escape(f"PARTIAL: {partial_run}"), style="bold red", highlight=False)
    for line, style in head_lines(comparison):
        console.print(escape(line), style=style, highlight=False)
    for block in terminal_blocks(comparison):
        if isinstance(block, Table):
            console.print(rich_table(block))
        elif isinstance(block, Text):
            for line in block.lines:
                console.print(escape(line), style=LINES.get(block.tone, ""))


def head_lines(comparison: JSON) -> Iterator[tuple[str, str]]:
    """Yields what is read first, each line with its style: what to do, how sure that is, and the ratios behind it."""
    loaded, decision = comparison.get("under_load"), comparison["decision"]
    for caveat in comparison.get("caveats", ()):
        yield f"Note: {caveat}", LINES["warning"]
    if decision:
        yield f"{decision['headline']}.", "bold"
        yield from ((line, "") for line in doubt_lines(decision))
        if ratios := decision.get("ratios"):
            yield ratios, ""
    if len(lines := list(verdict_lines(comparison))) > 1:
        yield "By link:", ""
        yield from ((f"  {line}", "") for line in lines)
    if loaded and loaded["headline"]:
        yield loaded["headline"], "bold"


def verdict_lines(comparison: JSON) -> Iterator[str]:
    """Yields a line for every round trip that was asked for, also if it was not measured. An older file has none."""
    if (verdicts := comparison.get("verdicts")) is None:
        return
    lines = {verdict["condition"]: verdict["line"] for verdict in verdicts}
    links = reading.links(comparison)
    for condition in links:
        undecided = f"{condition['name']}: not decided (fewer than two architectures answered)"
        yield lines.get(condition["name"], undecided)
    measured = {condition["link"]["rtt_ms"] for condition in links}
    asked = comparison["settings"].get("rtts_ms", ())
    yield from (f"RTT {rtt_ms:g} ms: not measured" for rtt_ms in asked if rtt_ms not in measured)


def doubt_lines(of: JSON) -> Iterator[str]:
    """Says how sure a decision is, why, and what would make it surer. An older file says nothing of it."""
    if "sureness" not in of:
        return
    yield f"How sure: {of['sureness']}{':' if of['reasons'] else '.'}"
    yield from (f"  - {reason}" for reason in of["reasons"])
    if of["surer"]:
        yield f"To be surer: measure again {', '.join(of['surer'])}."


def rich_table(table: Table) -> RichTable:
    """Renders a table for 80 columns: where there is less room, text folds and figures stay whole."""
    shown = RichTable(title=table.caption, title_justify="left", caption=table.note or None, box=box.SIMPLE, padding=0)
    for column in table.columns:
        if column.numeric:
            shown.add_column(column.heading, justify="right", no_wrap=True)
        else:
            shown.add_column(column.heading, overflow="fold", min_width=14)
    for row in table.rows:
        shown.add_row(*(RichText(cell.text, CELLS.get(cell.tone, "")) for cell in row))
    return shown
