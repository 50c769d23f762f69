"""Renders report.md: the report as Markdown with links to the plots."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from tandem.comparison.report.blocks import (
    Block,
    Bullets,
    Cell,
    DecisionBlock,
    Details,
    Listing,
    Paragraph,
    Plot,
    Report,
    Section,
    Table,
)
from tandem.comparison.report.html import NO_PLOTS


def markdown(report: Report, pictures: Mapping[str, str]) -> str:
    """Renders Markdown. `pictures`: paths of plots by name, relative to the text; without them, findings only."""
    parts = [f"# {escaped(report.title)}", f"{escaped(report.date)}. {escaped(report.setting)}"]
    parts += _decision(report.decision)
    for section in report.sections:
        parts += _section(section, pictures)
    return "\n\n".join(parts) + "\n"


def escaped(text: str) -> str:
    """Escapes Markdown and HTML, and joins lines."""
    return re.sub(r"([\\`*_\[\]|~#>])", r"\\\1", " ".join(text.split())).replace("&", "&amp;").replace("<", "&lt;")


def _decision(decision: DecisionBlock) -> Iterator[str]:
    yield "## Decision"
    yield f"**{escaped(decision.headline)}**"
    if decision.figures:
        yield _items([f"{what}: {value}" for value, what in decision.figures])
    for heading, items in (("Because", decision.because), ("What would change it", decision.would_change)):
        if items:
            yield f"### {heading}"
            yield _items(items)


def _section(section: Section, pictures: Mapping[str, str]) -> Iterator[str]:
    yield f"## {escaped(section.title)}"
    for block in section.blocks:
        if isinstance(block, Details):
            yield f"<details><summary>{escaped(block.summary)}</summary>"
            for inner in block.blocks:
                yield from _block(inner, pictures, under=block.summary)
            yield "</details>"
        else:
            yield from _block(block, pictures)


def _block(block: Block, pictures: Mapping[str, str], under: str = "") -> Iterator[str]:
    """Renders a block. `under`: the heading just above, which a table does not repeat."""
    if isinstance(block, Table):
        if block.caption != under:
            yield f"**{escaped(block.caption)}**"
        yield _table(block)
        if block.note:
            yield escaped(block.note)
    elif isinstance(block, Plot):
        yield f"### {escaped(block.title)}"
        if block.drawn:
            path = pictures.get(block.name)
            yield f"![{escaped(block.title)}]({path})" if path else escaped(NO_PLOTS)
        yield escaped(block.finding)
    elif isinstance(block, Bullets):
        yield f"### {escaped(block.heading)}"
        yield _items(block.items)
    elif isinstance(block, Listing):
        fence = "`" * (max((len(run) for run in re.findall("`+", block.text)), default=2) + 1)
        yield escaped(block.name)
        yield f"{max(fence, '```')}text\n{block.text}\n{max(fence, '```')}"
    elif isinstance(block, Paragraph):
        yield escaped(block.text)


def _items(items: tuple[str, ...] | list[str]) -> str:
    return "\n".join(f"- {escaped(item)}" for item in items)


def _table(table: Table) -> str:
    rows = [
        [escaped(column.heading) for column in table.columns],
        ["---:" if column.numeric else "---" for column in table.columns],
        *([_cell(cell) for cell in row] for row in table.rows),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(cell: Cell) -> str:
    return f"**{escaped(cell.text)}**" if cell.best else escaped(cell.text)
