"""Renders report.md: the report as Markdown with links to the plots."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tandem.comparison.report.blocks import (
    Block,
    Cell,
    Details,
    Output,
    Outputs,
    Plot,
    Report,
    Table,
    Text,
    Verdict,
    table,
    words,
)
from tandem.comparison.report.html import no_plots


def markdown(report: Report, pictures: Mapping[str, str]) -> str:
    """Renders Markdown. `pictures`: paths of plots by name, relative to the text; without them, findings only."""
    parts = [f"# {escaped(report.title)}", f"{escaped(report.date)}. {escaped(report.setting)}"]
    parts += [f"> {escaped(caution)}" for caution in report.cautions]
    parts += ["## Decision", f"**{escaped(report.headline)}**"]
    if report.sureness:
        parts.append(escaped(f"How sure: {report.sureness}. {' '.join(report.doubt)}"))
    if report.ratios:
        parts.append(_items(f"{what}: {value} ({interval})" for value, what, interval in report.ratios))
        parts.append(escaped(report.measure))
    parts += [_table(_strip(report.verdicts))] if report.verdicts else []
    for text in (*report.commands, *report.reasons):
        parts += _block(text, pictures)
    parts += ["### Where it was measured", _items(f"{what}: {value}" for what, value in report.card)]
    for section in report.sections:
        parts.append(f"## {escaped(section.title)}")
        for block in section.blocks:
            parts += _block(block, pictures)
    return "\n\n".join(parts) + "\n"


def _strip(verdicts: Sequence[Verdict]) -> Table:
    rows = [(each.where, each.headline, each.sureness, each.ratio, each.why) for each in verdicts]
    return table("", words("round trip", "what to do", "how sure", "speedup", "why"), rows)


def escaped(text: str) -> str:
    """Escapes Markdown and HTML, and joins lines."""
    return re.sub(r"([\\`*_\[\]|~#>])", r"\\\1", " ".join(text.split())).replace("&", "&amp;").replace("<", "&lt;")


def _block(block: Block, pictures: Mapping[str, str], under: str = "") -> Iterator[str]:
    """Renders a block. `under`: the heading just above, which a table does not repeat."""
    match block:
        case Details(summary, inner):
            yield f"<details><summary>{escaped(summary)}</summary>"
            for one in inner:
                yield from _block(one, pictures, under=summary)
            yield "</details>"
        case Table():
            if block.caption != under:
                yield f"**{escaped(block.caption)}**"
            yield _table(block)
            if block.note:
                yield escaped(block.note)
        case Plot(name, title, finding, drawn):
            yield f"### {escaped(title)}"
            if drawn:
                yield f"![{escaped(title)}]({pictures[name]})" if name in pictures else escaped(no_plots())
            yield escaped(finding)
        case Text("listing", (text,), heading):
            fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
            yield escaped(heading)
            yield f"{fence}text\n{text}\n{fence}"
        case Text("command", lines, heading):
            yield f"### {escaped(heading)}"
            yield "\n".join(["```bash", *lines, "```"])
        case Outputs(title, said, answers):
            yield f"### {escaped(title)}"
            yield escaped(said)
            yield "\n".join(map(_answer, answers))
        case Text("bullets", lines, heading):
            yield from [f"### {escaped(heading)}"] if heading else []
            yield _items(lines)
        case Text(_, lines):
            yield from map(escaped, lines)


def _answer(answer: Output) -> str:
    marked = f" **{escaped(answer.marked)}**" if answer.marked.strip() else ""
    note = f" ({escaped(answer.note)})" if answer.note else ""
    return f"- {escaped(answer.names)}: {escaped(answer.before)}{marked} {escaped(answer.after)}{note}"


def _items(items: Iterable[str]) -> str:
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
