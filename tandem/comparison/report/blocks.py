"""Defines the blocks of a report, independent of its format: texts, tables, plots, details.

A table is built once, for pages and for terminals of 80 columns, where it is brief: `brief` fields say how they differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

FORMATS = ("html", "md")
"""The formats in which reports are written."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table. `best` of its column: emphasized by more than color. `tone`: "good" or "bad", a color,
    or how sure the row is.

    `brief`: its text on a terminal; None: the same.
    """

    text: str
    best: bool = False
    tone: str = ""
    brief: str | None = None


@dataclass(frozen=True, slots=True)
class Column:
    """A column. `brief`: its heading on a terminal; None: the same. One without a heading is not shown there.

    `leads`: pages show it right after the headings of rows, so that a narrow screen has it without scrolling.
    """

    heading: str
    numeric: bool = True
    brief: str | None = None
    leads: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table. The first cell of a row is its heading; a row of one cell is a heading over rows, on terminals only.

    `brief`: caption and note on a terminal; None: the same.
    """

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    brief: tuple[str, str] | None = None
    kind: str = "table"

    def on_page(self) -> Table:
        """Returns the table as pages show it."""
        shown = [i for i, column in enumerate(self.columns) if column.heading]
        shown.sort(key=lambda i: (i > 0, not self.columns[i].leads))
        rows = tuple(tuple(row[i] for i in shown) for row in self.rows if len(row) > 1)
        return replace(self, columns=tuple(self.columns[i] for i in shown), rows=rows)

    def on_terminal(self) -> Table:
        """Returns the table as terminals show it."""
        columns = [replace(c, heading=c.heading if c.brief is None else c.brief) for c in self.columns]
        shown = [i for i, column in enumerate(columns) if column.heading]
        rows = (
            tuple(cell if cell.brief is None else replace(cell, text=cell.brief) for cell in row) for row in self.rows
        )
        rows = (tuple(row[i] for i in shown) if len(row) > 1 else row for row in rows)
        caption, note = self.brief or (self.caption, self.note)
        return Table(caption, tuple(columns[i] for i in shown), tuple(rows), note)


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot. `finding`: what it shows, in words. `drawn`: whether there is a picture; if not, `finding` says why.

    `failed`: there is none because of an error, and not because there is nothing to draw.
    """

    name: str
    title: str
    finding: str
    drawn: bool = True
    failed: bool = False
    kind: str = "plot"


@dataclass(frozen=True, slots=True)
class Text:
    """Lines under a small `heading`. `kind`: a "paragraph", "bullets", a "listing", which is preformatted, or a
    "command", which one click selects.

    `tone`: "quiet", "warning" or "bad", for terminals, which show the lines alone.
    """

    kind: str
    lines: tuple[str, ...]
    heading: str = ""
    tone: str = ""


@dataclass(frozen=True, slots=True)
class Output:
    """What the architectures `names` answered. `marked`: where it first differs from plain decoding; `note`: how."""

    names: str
    before: str
    marked: str = ""
    after: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Outputs:
    """The answers to one prompt side by side: one if all are the same, otherwise plain decoding's first."""

    title: str
    said: str
    answers: tuple[Output, ...]
    kind: str = "outputs"


@dataclass(frozen=True, slots=True)
class Details:
    """Blocks that are folded on a screen and open on paper."""

    summary: str
    blocks: tuple[Table | Text | Outputs, ...]
    kind: str = "details"


Block = Table | Plot | Text | Outputs | Details


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do at one round trip (`where`), how sure that is, the ratio it rests on, and the first reason."""

    where: str
    headline: str
    sureness: str = ""
    ratio: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    anchor: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """A report. First its cautions, then its decision: a headline, how sure it is ("sure", "weak", "noise", or "" where
    nothing is decided) with its `doubt` (why, and what would make it surer), `ratios` as (value, label, interval) with
    their `measure`, a verdict for each round trip, the commands that deploy it, the `card` of the machine as
    (what, value), and `reasons`.
    """

    title: str
    date: str
    setting: str
    cautions: tuple[str, ...]
    headline: str
    sureness: str
    doubt: tuple[str, ...]
    ratios: tuple[tuple[str, str, str], ...]
    measure: str
    verdicts: tuple[Verdict, ...]
    commands: tuple[Text, ...]
    card: tuple[tuple[str, str], ...]
    reasons: tuple[Text, ...]
    sections: tuple[Section, ...]


def paragraph(text: str, tone: str = "") -> Text:
    return Text("paragraph", (text,), tone=tone)


def bullets(heading: str, items: Iterable[str]) -> Text:
    return Text("bullets", tuple(items), heading)


def words(*headings: str) -> list[Column]:
    """Returns columns of text."""
    return [Column(heading, numeric=False) for heading in headings]


def numbers(*headings: str) -> list[Column]:
    """Returns columns of figures."""
    return [Column(heading) for heading in headings]


def table(
    caption: str,
    columns: Sequence[Column],
    rows: Iterable[Sequence[Cell | str]],
    note: str = "",
    brief: tuple[str, str] | None = None,
) -> Table:
    """Builds a table from rows of cells or plain text."""
    cells = tuple(tuple(cell if isinstance(cell, Cell) else Cell(cell) for cell in row) for row in rows)
    return Table(caption, tuple(columns), cells, note, brief)
