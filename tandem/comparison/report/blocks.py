"""Defines the blocks of a report, independent of its format: paragraphs, lists, tables, plots, details."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table.

    best: whether it is the best of its column, which is emphasized by more than color.
    tone: "good" or "bad", colored on the terminal.
    """

    text: str
    best: bool = False
    tone: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    heading: str
    numeric: bool = True


@dataclass(frozen=True, slots=True)
class Table:
    """A table. The first cell of a row is its heading."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    kind: str = "table"


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot. `finding`: what it shows, in words. `drawn`: whether there is a picture; if not, `finding` says why."""

    name: str
    title: str
    finding: str
    drawn: bool = True
    kind: str = "plot"


@dataclass(frozen=True, slots=True)
class Paragraph:
    text: str
    kind: str = "paragraph"


@dataclass(frozen=True, slots=True)
class Bullets:
    """A list under a small heading."""

    heading: str
    items: tuple[str, ...]
    kind: str = "bullets"


@dataclass(frozen=True, slots=True)
class Listing:
    """A preformatted text with a name."""

    name: str
    text: str
    kind: str = "listing"


@dataclass(frozen=True, slots=True)
class Details:
    """Blocks that are folded on a screen and open on paper."""

    summary: str
    blocks: tuple[Table | Paragraph | Listing, ...]
    kind: str = "details"


Block = Table | Plot | Paragraph | Bullets | Listing | Details


@dataclass(frozen=True, slots=True)
class Section:
    anchor: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class DecisionBlock:
    """The top of the report. `figures`: (value, label). Without a decision, the headline says why."""

    headline: str
    figures: tuple[tuple[str, str], ...] = ()
    because: tuple[str, ...] = ()
    would_change: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    title: str
    date: str
    setting: str
    decision: DecisionBlock
    sections: tuple[Section, ...]


def table(caption: str, columns: Sequence[Column], rows: Sequence[Sequence[Cell | str]], note: str = "") -> Table:
    """Builds a table from rows of cells or plain text."""
    cells = tuple(tuple(cell if isinstance(cell, Cell) else Cell(cell) for cell in row) for row in rows)
    return Table(caption, tuple(columns), cells, note)
