"""Prints a comparison on the terminal, from its comparison.json."""

from __future__ import annotations

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
    loaded, decision = comparison.get("under_load"), comparison["decision"]
    if partial_run := reading.partial(comparison):
        console.print(escape(f"PARTIAL: {partial_run}"), style="bold red", highlight=False)
    for headline in (decision and decision["headline"], loaded and loaded["headline"]):
        if headline:
            console.print(escape(headline), style="bold", highlight=False)
    for block in terminal_blocks(comparison):
        if isinstance(block, Table):
            console.print(rich_table(block))
        elif isinstance(block, Text):
            for line in block.lines:
                console.print(escape(line), style=LINES.get(block.tone, ""))


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
